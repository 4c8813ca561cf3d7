"""Which warnings of other packages are left out."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from genrl.quiet import MEANINGLESS

LINES = {
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects. This may affect",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community: no such file",
    "torch.utils._pytree": "<enum 'A'> is an Enum subclass and is now natively supported by torch.compile as",
    "transformers.utils.import_utils": "`A` requires torchvision (not installed); falling back to `B` for",
    "torchao": "Failed to load /a/torchao/_C_mxfp8.so: Could not load this library: /a/torchao/_C_mxfp8.so",
}


def test_only_these_lines_are_left_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built for CUDA is missed where that is."""
    assert LINES.keys() == MEANINGLESS.keys()
    for name in LINES.keys() - {"torchao"}:
        assert shown(name, caplog, LINES[name], "`A` requires librosa") == ["`A` requires librosa"]
    lines = [LINES["torchao"], "Failed to load /a/torchao/_C.so: Could not load this library: /a/torchao/_C.so"]
    for cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert shown("torchao", caplog, *lines) == (lines if cuda else lines[1:])


def shown(name: str, caplog: pytest.LogCaptureFixture, *lines: str) -> list[str]:
    caplog.clear()
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)  # some roots of these loggers do not propagate
    try:
        for line in lines:
            logger.warning(line)
    finally:
        logger.removeHandler(caplog.handler)
    return list(dict.fromkeys(record.getMessage() for record in caplog.records))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there torchao's libraries are missed")
def test_a_process_that_imports_torchao_says_nothing_of_it(root: Path) -> None:
    pytest.importorskip("torchao")
    program = "import genrl.diffusion.policy.loading, torchao, diffusers.quantizers.torchao"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and not any(re.search(one, done.stderr) for one in MEANINGLESS.values()), done.stderr
