"""The configuration: what is refused, with which words, and that nothing the user wrote is changed."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import save_file

import genrl
import genrl_rewards
from genrl.config import ConfigError, check_files, dump, load, load_located
from genrl.config.folders import read_json
from genrl.config.json_schemas import json_schema, keys_in, schema_of
from genrl.config.loading import load_given
from genrl.config.messages import OTHER_NAMES, TRL_NAMES
from genrl.config.method import KINDS, schema_class
from genrl.config.page import markdown
from genrl.config.yaml_source import MAX_BYTES, SourceError, parse
from genrl.diffusion.config.combinations import even, processes_problem
from genrl.diffusion.config.files import declared_columns
from genrl.diffusion.config.schema import Config
from tests.config.schemas import schema_validator

FIXTURES = Path(__file__).parents[1] / "fixtures" / "config"
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(ROOT.glob("configs/**/*.yaml"))
REFUSED = ("typos.yaml", "types.yaml", "impossible.yaml", "impossible_rollouts.yaml")
VALID = {
    "model": "{path: org/model}",
    "prompts": "{train: train.txt, eval: eval.txt}",
    "rewards": "[{name: shapes}]",
    "trainer": "{algorithm: flow_grpo}",
}


def cases(name: str) -> list[Any]:
    rows = yaml.safe_load((FIXTURES / name).read_text())
    return [pytest.param(row, id=row.get("key", row.get("text", ""))[:40]) for row in rows]


def text_of(case: dict[str, Any]) -> str:
    """The case's YAML before the sections of a valid file that it does not write itself."""
    own = {line.split(":")[0] for line in case["yaml"].splitlines()} | set(case.get("without", ()))
    rest = [f"{key}: {value}" for key, value in VALID.items() if key not in own]
    return "\n".join([case["yaml"], *rest]) + "\n"


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(path: Path, overrides: list[str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides or [])
    return caught.value


@pytest.mark.parametrize("case", [case for name in REFUSED for case in cases(name)])
def test_refused_with_place_and_advice(case: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, text_of(case))
    error = refused(path)
    lines = [line for line in str(error).splitlines() if line.startswith(f"{path}:{case['line']}: {case['key']}")]
    assert lines, f"no line for {case['key']} at line {case['line']} in:\n{error}"
    says = case["says"] if isinstance(case["says"], list) else [case["says"]]
    assert all(part in lines[0] for part in says)


@pytest.mark.parametrize("case", cases("not_yaml.yaml"))
def test_refused_text(case: dict[str, Any], tmp_path: Path) -> None:
    error = refused(write(tmp_path, case["text"]))
    assert error.problems[0].origin.line == case["line"], str(error)
    for part in case["says"] if isinstance(case["says"], list) else [case["says"]]:
        assert part in str(error)


@pytest.mark.parametrize(
    "file, output",
    [("configs/vlm/a.yaml", "vlm/a"), ("configs/a.yaml", "a"), ("a.yaml", "a"), ("configs/x/configs/y/a.yaml", "y/a")],
)
def test_files_of_one_name_train_into_different_folders(tmp_path: Path, file: str, output: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    text = text_of({"yaml": "seed: 3", "without": ["output"]})
    assert load(write((tmp_path / file).parent, text)).output == str(Path("runs", output))


def test_every_suggested_key_exists_and_the_page_of_keys_is_current() -> None:
    assert set(OTHER_NAMES.values()) <= set(keys_in(schema_of({})))
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == markdown(), "run `python -m genrl.config.page > docs/configuration.md`"


@pytest.mark.parametrize("file", ["quickstart.yaml", "vlm/quickstart.yaml"])
@pytest.mark.parametrize("name", TRL_NAMES)
def test_names_of_trl_are_answered_by_ours(root: Path, file: str, name: str) -> None:
    known = [path for path in TRL_NAMES[name] if path != "generation.max_new_tokens" or file.startswith("vlm")]
    ours = known[-1] if file.startswith("vlm") else (known or [None])[0]
    with pytest.raises(ConfigError, match=f"did you mean {ours}[?]" if ours else f"{name}: unknown key; top-level"):
        load(root / "configs" / file, [f"{name}=1"])


def test_all_problems_in_one_message(tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer:\n  lrr: 1\n  weight_decay: no\nseeed: 1\niterations: 0\n")
    error = refused(path, ["sampling.grup_size=3"])
    named = {(problem.path, problem.origin.line) for problem in error.problems}
    assert len(named) == 9 and {(name, 1) for name in VALID} < named
    assert {("optimizer.lrr", 2), ("optimizer.weight_decay", 3), ("seeed", 4), ("iterations", 5)} < named
    assert ("sampling.grup_size", None) in named and "override 'sampling.grup_size=3': sampling.grup_size" in str(error)
    error = refused(write(tmp_path, text_of({"yaml": "sampling: {group_size: 1, num_inference_steps: 1}"})))
    assert len(error.problems) == 2


def test_settings_classes_suggest_as_files_do() -> None:
    for make, said in (
        (lambda: genrl.Sampling(group_sice=4), "genrl.Sampling: sampling.group_sice: unknown key; did you .*_size"),
        (lambda: genrl.FlowGRPO(kl_wieght=1.0), "trainer.kl_wieght: unknown key; did you mean trainer.kl_weight[?]"),
        (lambda: genrl.Evaluation(every="3"), "evaluation.every: found '3' .*; write 3 without quotes"),
        (lambda: genrl.PPO(clip_rang=1), "genrl.PPO: trainer.clip_rang: unknown key; did you mean trainer.clip_range"),
    ):
        with pytest.raises(ConfigError, match=said):
            make()


def test_methods_are_called_by_their_short_names_too(tmp_path: Path) -> None:
    sections = {key: yaml.safe_load(value) for key, value in VALID.items()}
    for short, whole in (("grpo", "flow_grpo"), ("nft", "diffusion_nft")):
        config = load_given({**sections, "trainer": {"algorithm": short}}, {}, "a test")[0]
        assert config.trainer.algorithm == whole


def test_in_python_contradictions_are_refused_too_and_what_is_made_is_frozen() -> None:
    sections = {key: yaml.safe_load(value) for key, value in VALID.items()}
    with pytest.raises(ConfigError, match="use a group of 2 or more"):
        Config(**sections, sampling={"group_size": 1})
    with pytest.raises(ValidationError, match="frozen"):
        Config(**sections, evaluation={"every": 0}).seed = 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1.e-4", 1e-4), ("-.5", -0.5), ("1E3", 1000.0), ("010", 10), ("+7", 7), ("0x10", "0x10"),
        ("1_000", "1_000"), ("on", "on"), ("yes", "yes"), ("off", "off"), ("NO", "NO"), ("true", True),
        ("False", False),
        ("null", None), ("~", None), ("", None), ("2020-01-01", "2020-01-01"), ("12:30", "12:30"), (".inf", ".inf"),
        ("'1'", "1"), ('"null"', "null"), ("1.2.3", "1.2.3"), ("e5", "e5"), ("=", "="), ("!!str 3", "3"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]), ("!!float 3", 3.0),
    ],
)  # fmt: skip
def test_scalars_are_yaml_1_2(text: str, value: object) -> None:
    result = parse(text).value
    assert result == value and type(result) is type(value)


def test_bombs_and_files_that_cannot_be_read_are_refused_and_anchors_located(tmp_path: Path) -> None:
    names = "abcdefghij"
    pairs = zip(names, names[1:], strict=False)
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairs)
    assert "aliases" in str(refused(write(tmp_path, bomb)))
    assert "nested deeper" in str(refused(write(tmp_path, "a: " + "[" * 5000)))
    assert "nested deeper" in str(refused(write(tmp_path, "a: " + "{b: " * 5000)))
    assert "larger than" in str(refused(write(tmp_path, "#" * (MAX_BYTES + 1))))
    assert "more than 5,000 values" in str(refused(write(tmp_path, "a: [" + "1," * 20_000 + "]")))
    path = tmp_path / "a.yaml"
    path.write_bytes(b"seed: 1\n# caf\xe9\n")
    assert str(path) + ":2: byte 0xe9" in str(refused(path))
    (tmp_path / "aa.yaml").symlink_to("gone")
    assert f"did you mean {path}?" in str(refused(tmp_path / "aa.yaml"))
    source = parse("a: &x\n  b: 1\nc: *x\n")
    assert source.value == {"a": {"b": 1}, "c": {"b": 1}}
    assert source.lines[("a", "b")] == 2 and source.lines[("c",)] == 3


class TestOverrides:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path, text_of({"yaml": "optimizer: {lr: 1e-3}\nmodel: {path: org/model, lora: null}"}))

    def test_values_are_yaml(self, path: Path) -> None:
        config = load(path, ["optimizer.lr=1e-4", "ema=null", "trackers=[wandb, trackio]", "output='3'", "seed=010"])
        assert (config.optimizer.lr, config.ema, config.trackers) == (1e-4, None, ("wandb", "trackio"))
        assert (config.output, config.seed) == ("3", 10)

    def test_list_items_and_sections_and_the_last_one_wins(self, path: Path) -> None:
        sections = ["model.lora.rank=4", "trainer={algorithm: diffusion_nft, beta: 0.1}"]
        config = load(path, ["rewards.0.weight=2", "checkpoint.keep=5", *sections, "seed=1", "seed=2"])
        assert config.rewards[0].weight == 2 and config.checkpoint.keep == 5 and config.seed == 2
        assert config.model.lora is not None and config.model.lora.rank == 4
        assert config.trainer.algorithm == "diffusion_nft" and config.trainer.beta == 0.1

    def test_refused(self, path: Path) -> None:
        for override, says in (
            ("optimizer.lrr=1", "did you mean optimizer.lr?"),
            ("lr=1", "did you mean optimizer.lr?"),
            ("optimizer.lr=fast", "a number above 0"),
            ("optimizer.lr", "an override is key=value"),
            ("=1", "an override is key=value"),
            ("optimizer..lr=1", "an override is key=value"),
            ("rewards.1.weight=2", "rewards is a list of 1: write rewards.0 to rewards.0"),
            ("rewards.first.weight=2", "rewards is a list of 1"),
            ("model.path.x=2", "model.path is 'org/model', not a section"),
            ("optimizer.lr=[1", "not YAML"),
            ("include=b.yaml", "cannot be overridden"),
            ("sampling.group_size=1", "use a group of 2 or more"),
        ):
            error = refused(path, [override])
            assert says in str(error) and f"override {override!r}" in str(error)


class TestInclude:
    def test_merges_sections_and_replaces_lists(self, tmp_path: Path) -> None:
        base = "optimizer: {lr: 1e-3, weight_decay: 1e-6}\nrewards: [{name: shapes}, {name: ocr}]"
        (tmp_path / "bases").mkdir()
        write(tmp_path / "bases", text_of({"yaml": base}), "base.yaml")
        more = "include: bases/base.yaml\noptimizer: {lr: 1e-4}\nrewards: [{name: clipscore}]\n"
        config = load(write(tmp_path, more, "b.yaml"))
        assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-4, 1e-6)
        assert [reward.name for reward in config.rewards] == ["clipscore"] and config.output == "runs/b"
        assert load(write(tmp_path, "include: configs/quickstart.yaml\niterations: 3\n", "c.yaml")).iterations == 3

    def test_errors_name_the_file_they_are_in(self, tmp_path: Path) -> None:
        base = write(tmp_path, text_of({"yaml": "optimizer: {lrr: 1e-3}\nrewards: [{name: a}, {nam: b}]"}), "base.yaml")
        path = write(tmp_path, "include: base.yaml\nseeed: 1\n")
        error = refused(path)
        assert f"{base}:1: optimizer.lrr" in str(error) and f"{base}:2: rewards.1.nam" in str(error)
        assert f"{path}:2: seeed" in str(error)

    def test_refused(self, tmp_path: Path) -> None:
        for include, says in (
            ("include: nested.yaml", "may not include another"),
            ("include: bas.yaml", "did you mean"),
            ("include: [base.yaml]", "one base file"),
            ("include: a.yaml", "may not include another"),
        ):
            write(tmp_path, text_of({"yaml": "seed: 1"}), "base.yaml")
            write(tmp_path, "include: base.yaml", "nested.yaml")
            assert says in str(refused(write(tmp_path, include)))


def contains(whole: object, part: object) -> bool:
    """Whether every value of `part` stands in `whole` at the same place."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_come_back_fit_the_schema_and_two_processes(path: Path, tmp_path: Path) -> None:
    config = load(path)
    saved = write(tmp_path, dump(config), "config.yaml")
    assert load(saved) == config
    folder = path.relative_to(ROOT / "configs").with_suffix("")
    written, dumped = parse(path.read_text()).value, parse(saved.read_text()).value
    assert isinstance(written, dict)
    part = written.pop("include", None) is not None  # what is missing is in its base
    assert written.get("output", config.output) == config.output
    assert part or "output" in written or config.output == str(Path("runs", folder))
    assert contains(dumped, written)
    assert list(schema_validator().iter_errors(dumped if part else written)) == []
    if isinstance(config, Config):
        assert processes_problem(config, 2) is None and 2 in islice(even(config), 2)


def test_nothing_written_is_changed(tmp_path: Path) -> None:
    """Texts that YAML would read as something else, as values and as keys, and numbers at the borders."""
    texts = ["1e-4", "on", "null", "010", "1_0", "~", "true", "=", "<<", "- a", "a: b", "#", "1:30", " a ", "é 日"]
    args = {"texts": [*texts, "", "\t"], "keys": dict.fromkeys(texts, [{}]), "numbers": [1e-12, 1e300, 10**12, True]}
    sections: dict[str, Any] = {key: yaml.safe_load(value) for key, value in VALID.items()}
    document = sections | {"rewards": [{"name": "é: #", "weight": 1e-12, "args": args}], "seed": 2**40}
    config = load(write(tmp_path, json.dumps(document, ensure_ascii=False), "first.yaml"))  # JSON is YAML
    text = dump(config)
    assert contains(parse(text).value, document)
    assert load(write(tmp_path, text, "second.yaml")) == config and dump(load(tmp_path / "second.yaml")) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_no_text_crashes_the_reader(text: str) -> None:
    try:
        parse(text)
    except SourceError as error:
        assert error.problems


def test_schema_describes_every_key_and_validates() -> None:
    schema = json_schema()
    for section in ("model", "policy", "vlm"):
        nodes = keys_in(schema_of({section: {}})).items()
        assert [key for key, node in nodes if "description" not in node] == []
    for kind in KINDS:
        own = schema["$defs"][schema_class(kind).__name__]
        assert own["properties"]["include"]["type"] == "string"
        assert own["additionalProperties"] is False
    assert json.loads(json.dumps(schema)) == schema
    common = [key for key in keys_in(schema_of({})) if not key.startswith("trainer")]
    assert len(common) <= 132  # a few keys decide a run, beside those of its method; more are more to read


class TestFiles:
    @pytest.fixture
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "model" / "scheduler").mkdir(parents=True)
        index = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]}
        write(tmp_path / "model", json.dumps(index), "model_index.json")
        (tmp_path / "model" / "transformer").mkdir()
        write(tmp_path / "model" / "transformer", '{"num_layers": 1}', "config.json")
        save_file({"weight": np.ones(2)}, tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
        self.scheduler(tmp_path, '{"_class_name": "FlowMatchEulerDiscreteScheduler"}')
        write(tmp_path, "".join(f"prompt {k}\n" for k in range(20)), "train.txt")
        write(tmp_path, "held out\n", "eval.txt")
        return tmp_path

    def scheduler(self, folder: Path, text: str) -> None:
        (folder / "model" / "scheduler" / "scheduler_config.json").write_text(text)

    def problem(self, folder: Path, yaml_text: str) -> str:
        path = write(folder, text_of({"yaml": yaml_text}))
        config, origins = load_located(path)
        with pytest.raises(ConfigError) as caught:
            check_files(config, origins)
        return str(caught.value)

    def notes(self, folder: Path, yaml_text: str) -> list[str]:
        return check_files(*load_located(write(folder, text_of({"yaml": yaml_text}))))

    def test_sizes_are_counted_in_the_prompts(self, files: Path) -> None:
        few = "sampling: {buckets: [[64, 64], [64, 96], [96, 64]], group_size: 4, batch_size: 32}"  # 20 prompts
        said = self.problem(files, f"{few}\nprompts: {{train: train.txt, eval: eval.txt}}")
        assert "sampling.buckets: 64 x 64 has 7 of the 20 prompts, and a micro-batch is of 8" in said
        assert "no row has a column height, width, num_frames" in self.problem(files, "sampling: {buckets: rows}")
        row = '{"prompt": "p", "height": 64}\n'
        write(files, row * 20, "sized.jsonl")
        notes = self.notes(files, "prompts: {train: sized.jsonl, eval: eval.txt}")
        assert any("the column height is not read; sampling.buckets: rows" in note for note in notes)

    @pytest.mark.parametrize(
        ("text", "line", "says"),
        [
            ("model:\n  path: ./modle", 2, "did you mean model?"),
            ("model:\n  path: ./train.txt", 2, "is a file; a pipeline is a folder"),
            ("model:\n  path: ./a.safetensors\n  config: ./model", 2, "no such file: "),
            ("model:\n  path: ./b.safetensors\n  config: ./modle", 3, "did you mean model?"),
            ("model:\n  path: ./empty", 2, "no model_index.json"),
            ("model:\n  path: ./blocks", 2, "is a ModularPipeline, which is run in blocks"),
            ("model:\n  path: org/mo del", 2, "neither a folder nor a hub id"),
            ("seed: 1\nprompts: {train: trian.txt, eval: eval.txt}", 2, "did you mean train.txt?"),
            ("prompts: {train: train.csv, eval: eval.txt}", 1, "prompts are .txt"),
            ("prompts: {train: train.txt, eval: eval.txt, column: text}", 1, "prompts.column: a .txt file has one"),
            ("prompts: {train: train.txt, eval: copy.txt}", 1, "every one of these prompts is trained on"),
            ("seed: 1\nrewards:\n  - name: shpaes", 3, "shapes"),
            ("rewards:\n  - name: ./mine.py:Absent", 2, "has no 'Absent'"),
            ("rewards: [{name: './mine.py:needs_word'}]\nprompts: {train: t.jsonl, eval: e.jsonl}", 2, "column word"),
            ("output: train.txt/run", 1, "train.txt is a file; name a folder"),
            ("sampling: {inputs: {image: pic}}", 1, "sampling.inputs.image asks for the column pic"),
            ("seed: 2\ntrackers: [tensorboard, dvclive]", 2, "pip install dvclive"),
            ("model: {path: ./model}\ntrainer:\n  algorithm: flow_grpo\n  kernel: ddim", 4, "flow_sde or flow_cps"),
        ],
    )
    def test_refused(self, files: Path, text: str, line: int, says: str) -> None:
        (files / "empty").mkdir()
        (files / "blocks").mkdir()
        write(files / "blocks", "{}", "modular_model_index.json")
        write(files, "", "train.csv")
        write(files, "prompt 3\n", "copy.txt")
        write(files, "def needs_word(images, prompts, word, scale=1): ...\n", "mine.py")
        write(files, '{"prompt": "a", "words": "b"}\n', "t.jsonl")
        write(files, '{"prompt": "c", "word": "b"}\n', "e.jsonl")
        result = self.problem(files, text)
        assert f"a.yaml:{line}: " in result and says in result, result

    def test_kernels_and_models_that_do_not_fit(self, files: Path) -> None:
        self.scheduler(files, '{"_class_name": "DDIMScheduler", "prediction_type": "epsilon"}')
        assert "use ddim with noise_level 1" in self.problem(files, "model: {path: ./model}")
        nft = "model: {path: ./model}\ntrainer: {algorithm: diffusion_nft}"
        assert "diffusion_nft needs a flow model" in self.problem(files, nft)
        ddim = "model: {path: ./model}\ntrainer: {algorithm: flow_grpo, kernel: ddim}"
        assert self.notes(files, ddim) == []
        self.scheduler(files, '{"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction"}')
        assert "set use_flow_sigmas to true" in self.problem(files, nft)
        flow = "model: {path: ./model, scheduler: {use_flow_sigmas: true}}\ntrainer: {algorithm: diffusion_nft}"
        assert self.notes(files, flow) == []

    def test_remarks(self, files: Path) -> None:
        write(files, "prompt 3\nheld out\n", "eval.txt")
        write(files, "def mine(images): ...\n", "mine.py")
        write(files, "".join(f"prompt {k}\n" for k in range(200)) + "\x1b[31m\n", "train.txt")
        (files / "runs" / "a").mkdir(parents=True)
        write(files / "runs" / "a", "x", "config.yaml")
        notes = "\n".join(self.notes(files, "model: {path: ./model}\nrewards: [{name: './mine.py:mine'}]"))
        assert "1 of 2 prompts are trained on too" in notes and "train.txt:201: character 0x001b" in notes
        assert "runs the code of" in notes and "is in use" in notes
        assert "org/model is not on this machine yet" in self.notes(files, "seed: 1")[0]


def test_declared_columns_are_read_without_importing(tmp_path: Path) -> None:
    for source, columns in (
        ("def r(images, prompts): ...", ()),
        ("def r(images, word, *, count, group, scale=2, strict=True): ...", ("word", "count")),
        ("def r(images, *, word=None, count): ...", ("count",)),
        ("class r:\n    def __init__(self, path): ...\n    def __call__(self, images, word, size=3): ...", ("word",)),
        ("class r:\n    pass", ()),
        ("from elsewhere import r", ()),
    ):
        path = write(tmp_path, "raise SystemExit('imported')\n" + source + "\n", "r.py")
        assert declared_columns(genrl_rewards.Origin("r", "file", str(path), "r")) == columns


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '"a"', "\udcff"])
def test_broken_model_index(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model_index.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_json(path) == {}


@pytest.mark.parametrize("key", ["alpha: 64", "alpha: 128", "rank: 32", "type: lora", "targets: [to_q]"])
def test_what_a_lora_to_go_on_with_has_itself_is_not_written_beside_it(tmp_path: Path, key: str) -> None:
    """The default's value, too: it would be ignored. What a run writes down is read again."""
    path = write(tmp_path, text_of({"yaml": "model: {path: org/m, lora: {from: org/lora}}"}))
    config = load(path)
    (tmp_path / "b.yaml").write_text(dump(config))
    assert load(tmp_path / "b.yaml") == config
    path = write(tmp_path, text_of({"yaml": f"model: {{path: org/m, lora: {{from: org/lora, {key}}}}}"}))
    with pytest.raises(ConfigError, match="the adapter that is loaded has its own; leave it out"):
        load(path)
