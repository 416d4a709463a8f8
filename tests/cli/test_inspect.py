"""`inspect` counts a checkpoint of the real shapes from headers, and refuses what loading would refuse."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

import cli
from model.parameters import ParameterSpec
from model.quantization import Format
from tests import synthetic
from tests.oracles import copy_checkpoint

DATA = Path(__file__).parents[1] / "data"
GIB = 2**30
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


def report(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The JSON document of one run."""
    assert cli.main(["inspect", str(directory), "--json", *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def by_role(document: dict[str, Any], column: str) -> dict[str, int]:
    return {row["role"]: row[column] for row in document["roles"]}


def test_census_and_bytes_per_gpu_of_the_real_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVFP4 routed experts over BF16, four GPUs."""

    def format_of(spec: ParameterSpec) -> Format:
        return "nvfp4" if spec.role in ("routed experts", "mtp experts") else "plain"

    raw = synthetic.real_config() | {"quantization_config": MIXED}
    synthetic.write_sparse(tmp_path, raw, format_of)
    start = time.monotonic()
    document = report(tmp_path, capsys, "--tp", "4")
    # Seconds, not minutes: nothing but headers is read (2 s on an idle machine).
    assert time.monotonic() - start < 60
    parameters, gpu_bytes = by_role(document, "parameters"), by_role(document, "gpu_bytes")
    assert parameters["routed experts"] == 304_405_807_104
    assert sum(count for role, count in parameters.items() if role.startswith("mtp")) == 7_432_592_416
    assert sum(parameters.values()) == 321_323_031_390 - 563_627_008  # without the vision tower
    expected = {
        "kda": 2.231,
        "mla": 0.731,
        "indexers": 0.153,
        "routed experts": 39.867,
        "shared experts": 0.492,
        "routers": 0.092,
        "dense mlp": 0.211,
        "mhc": 0.132,
        "norms": 0.001,
    }
    for role, gib in expected.items():
        # Three decimals; convolution taps are kept in F32 here, 0.0016 GiB more than in BF16.
        assert gpu_bytes[role] / GIB == pytest.approx(gib, abs=0.002 if role == "kda" else 0.0006), role
    assert (gpu_bytes["embedding"] + gpu_bytes["head"]) / GIB == pytest.approx(0.591, abs=0.0006)
    trunk = sum(count for role, count in gpu_bytes.items() if not role.startswith("mtp"))
    assert trunk / GIB == pytest.approx(44.50, abs=0.006)
    assert sum(gpu_bytes.values()) / GIB == pytest.approx(45.61, abs=0.006)
    assert document["mtp"] == {"present": True, "usable": True, "problems": []}


@pytest.mark.parametrize(
    ("form", "gib"), [("plain", 3.53), ("mxfp8", 1.90), ("fp8_block", 1.84), ("nvfp4", 1.11)]
)
def test_bytes_per_gpu_of_the_mtp_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: Format, gib: float
) -> None:
    raw = synthetic.real_config() | {"quantization_config": MIXED}
    raw["text_config"] |= {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    raw["text_config"]["mlp_layer_types"] = ["dense"]
    synthetic.write_sparse(tmp_path, raw, lambda spec: form if spec.role == "mtp experts" else "plain")
    gpu_bytes = by_role(report(tmp_path, capsys, "--tp", "4"), "gpu_bytes")
    mtp = sum(count for role, count in gpu_bytes.items() if role.startswith("mtp"))
    assert mtp / GIB == pytest.approx(gib, abs=0.006)


def test_bytes_of_the_fp8_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles, widths and formats of the FP8 release add up to its published tensor bytes, to the byte."""
    quantised = ("_proj.weight", "q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight")

    def format_of(spec: ParameterSpec) -> Format:
        mlp = ".mlp." in spec.name and spec.name.endswith(quantised)
        mla = spec.role in ("mla", "mtp attention") and "kv_b" not in spec.name and "indexer" not in spec.name
        return "fp8_block" if mlp or mla else "plain"

    released = synthetic.stored_as

    def released_widths(spec: ParameterSpec, format: Format) -> Any:
        stored = released(spec, format)
        wide = ("A_log", "dt_bias", "_base", "_scale", "e_score_correction_bias")
        if spec.kind == "float32" and not spec.name.endswith(wide):
            (part,) = stored.parts
            narrow = part._replace(dtype="BF16", nbytes=part.nbytes // 2)
            return dataclasses.replace(stored, parts=(narrow,))
        return stored

    monkeypatch.setattr(synthetic, "stored_as", released_widths)
    unlisted = ["*.self_attn.[qkv]_proj", "*.[bfg]_proj", "*.[fg]_[ab]_proj", "*.kv_b_proj", "*.indexer"]
    kda = [f"model.language_model.layers.{i}.self_attn" for i in range(45) if i % 4 != 3]
    declared = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", *unlisted, *kda]}
    synthetic.write_sparse(tmp_path, synthetic.real_config() | {"quantization_config": declared}, format_of)
    vision_bytes = 2 * 563_627_008
    assert sum(by_role(report(tmp_path, capsys), "file_bytes").values()) == 328_326_771_576 - vision_bytes


def test_tables_name_roles_layers_formats_and_the_mtp_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(DATA / "ct")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (experts,) = [line for line in lines if line.startswith("routed experts")]
    assert experts.split()[2:4] == ["3-7", "nvfp4"]
    (drafts,) = [line for line in lines if line.startswith("mtp experts")]
    assert drafts.split()[2:4] == ["8", "fp8_block"]
    assert any(line.startswith("vision") for line in lines)
    assert lines[-1] == "MTP layer: usable"


@pytest.mark.parametrize("damage", ["absent", "damaged"])
def test_an_mtp_layer_that_cannot_be_used_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    prefix = "model.language_model.layers.8." + ("enorm" if damage == "damaged" else "")
    directory = copy_checkpoint(
        DATA / "ct", tmp_path / "copy", lambda t: {n: v for n, v in t.items() if not n.startswith(prefix)}
    )
    mtp = report(directory, capsys)["mtp"]
    assert (mtp["present"], mtp["usable"], bool(mtp["problems"])) == (
        damage == "damaged",
        False,
        damage == "damaged",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "3"], "cannot be cut into 3"),
        (["--tp", "0"], "--tp is 0"),
    ],
)
def test_impossible_splits_are_wrong_use(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["inspect", str(DATA / "bf16"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("directory", ["missing", "file"])
def test_what_is_no_checkpoint_directory_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], directory: str
) -> None:
    (tmp_path / "file").write_text("not a directory")
    assert cli.main(["inspect", str(tmp_path / directory)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and not captured.out
