"""Loading fills every parameter exactly once with the file's numbers, or stops and names what is wrong."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import ConfigError, load_config
from model.formats import Fp8BlockWeight, Mxfp8Weight, Nvfp4Weight, PlainWeight
from model.glm5_next import Glm5Next
from model.weights import WeightError, WeightTree, load_weights
from tests import driver
from tests.oracles import copy_checkpoint, read_tensors

DATA = Path(__file__).parents[1] / "data"
M = "model.language_model."
CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


def load(directory: Path, **options: Any) -> WeightTree:
    """The directory's tree, plain matrices in bfloat16 unless told otherwise."""
    options = {"linear_dtype": torch.bfloat16, "device": CPU} | options
    return load_weights(directory, load_config(directory), **options)


def edited(tmp_path: Path, edit: Callable[[Tensors], Any], source: str = "modelopt") -> Path:
    """A copy of a data directory whose tensors `edit` changed in place."""

    def apply(tensors: Tensors) -> Tensors:
        edit(tensors)
        return tensors

    return copy_checkpoint(DATA / source, tmp_path / "edited", apply)


def rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[M + new] = tensors.pop(M + old)


class TestValues:
    """What comes out of a good directory."""

    def test_float32_roles_keep_their_bits(self, tmp_path: Path) -> None:
        """Field bug A3: 0.7371 and 1.0001 survive, whatever happens to the other dtypes."""
        names = ["hc_attn_scale", "hc_ffn_base", "self_attn.A_log", "self_attn.dt_bias"]
        odd = torch.tensor([0.7371, 1.0001])

        def edit(tensors: Tensors) -> None:
            for name in names:
                tensors[f"{M}layers.0.{name}"].flatten()[:2] = odd
            tensors[f"{M}layers.3.mlp.gate.e_score_correction_bias"][:2] = odd

        tree = load(edited(tmp_path, edit))
        loaded = [tree.at("layers.0").tensor(name) for name in names]
        loaded.append(tree.tensor("layers.3.mlp.gate.e_score_correction_bias"))
        for tensor in loaded:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor.flatten()[:2].view(torch.int32), odd.view(torch.int32))

    def test_a_float32_role_stored_narrow_is_widened(self) -> None:
        ape = load(DATA / "bf16").tensor("layers.3.self_attn.indexer.index_kpool_compress_ape")
        stored = read_tensors(DATA / "bf16")[f"{M}layers.3.self_attn.indexer.index_kpool_compress_ape"]
        assert (ape.dtype, stored.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(ape, stored.float())

    def test_both_nvfp4_forms_give_the_same_convention(self) -> None:
        """Field bug A2, in whole directories: multiply, low nibble first, scales of every expert its own."""
        for name, code, scale in (
            ("modelopt", "weight", "weight_scale_2"),
            ("ct", "weight_packed", "weight_global_scale"),
        ):
            stored = read_tensors(DATA / name)
            stack = load(DATA / name).at("layers.3.mlp").experts("up_proj")
            assert isinstance(stack, Nvfp4Weight)
            for expert in range(8):
                prefix = f"{M}layers.3.mlp.experts.{expert}.up_proj."
                assert torch.equal(stack.codes[expert], stored[prefix + code])
                number = stored[prefix + scale].squeeze()
                assert torch.equal(stack.tensor_scale[expert], number if name == "modelopt" else 1 / number)

    def test_gate_and_up_keep_their_own_scales(self) -> None:
        tree = load(DATA / "modelopt").at("layers.4.mlp")
        gate, up = tree.experts("gate_proj"), tree.experts("up_proj")
        assert isinstance(gate, Nvfp4Weight) and isinstance(up, Nvfp4Weight)
        assert not torch.equal(gate.tensor_scale, up.tensor_scale)

    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_a_tensor_scale_may_be_a_scalar_or_one_element(
        self, tmp_path: Path, shape: tuple[int, ...]
    ) -> None:
        def edit(tensors: Tensors) -> None:
            for name in list(tensors):
                if name.endswith("weight_scale_2"):
                    tensors[name] = tensors[name].reshape(shape)

        stack = load(edited(tmp_path, edit)).at("layers.3.mlp").experts("down_proj")
        expected = load(DATA / "modelopt").at("layers.3.mlp").experts("down_proj")
        assert torch.equal(stack.expand(torch.float32), expected.expand(torch.float32))

    def test_fused_rows_are_the_parts_in_order(self) -> None:
        attention = load(DATA / "bf16").at("layers.0.self_attn")
        stored = read_tensors(DATA / "bf16")
        names = ["q_proj", "b_proj", "f_a_proj"]
        expected = torch.cat([stored[f"{M}layers.0.self_attn.{name}.weight"] for name in names])
        assert torch.equal(attention.fused(names).tensor, expected)

    def test_linear_dtype_is_the_resident_dtype_of_plain_matrices(self) -> None:
        weight = load(DATA / "bf16", linear_dtype=torch.float32).linear("lm_head")
        assert isinstance(weight, PlainWeight)
        assert torch.equal(weight.tensor, read_tensors(DATA / "bf16")["lm_head.weight"].float())

    def test_a_single_file_without_index_loads(self, tmp_path: Path) -> None:
        save_file(read_tensors(DATA / "bf16"), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((DATA / "bf16" / "config.json").read_bytes())
        assert load(tmp_path).tensor("norm.weight").shape == (64,)

    @pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
    def test_other_prefixes_name_the_same_parameters(self, tmp_path: Path, prefix: str) -> None:
        def edit(tensors: Tensors) -> None:
            for name in [name for name in tensors if name.startswith(M)]:
                tensors[prefix + name.removeprefix(M)] = tensors.pop(name)

        tree = load(edited(tmp_path, edit))
        assert torch.equal(tree.tensor("norm.weight"), load(DATA / "modelopt").tensor("norm.weight"))

    def test_progress_counts_bytes_up_to_the_total(self) -> None:
        calls: list[tuple[int, int]] = []
        tree = load(DATA / "ct", progress=lambda done, total: calls.append((done, total)))
        take_all(tree)
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert calls[-1][0] == calls[-1][1]


def take_all(tree: WeightTree) -> None:
    """Take every parameter once, one by one."""
    for name, parameter in tree.parameters.items():
        tree.linear(parameter.spec.stem) if parameter.spec.kind == "linear" else tree.tensor(name)


class TestCoverage:
    """Every parameter exactly once; every tensor consumed or skipped by name."""

    def test_finish_is_silent_after_every_parameter_was_taken_once(self) -> None:
        tree = load(DATA / "modelopt")
        take_all(tree)
        tree.finish()

    def test_finish_names_what_was_left_and_what_was_taken_twice(self) -> None:
        tree = load(DATA / "modelopt")
        take_all(tree)
        tree.tensor("norm.weight")
        with pytest.raises(WeightError, match=r"norm\.weight: taken 2 times"):
            tree.finish()
        with pytest.raises(WeightError, match="taken 0 times"):
            load(DATA / "modelopt").finish()

    def test_a_name_the_checkpoint_lacks_is_an_error(self) -> None:
        tree = load(DATA / "modelopt")
        assert tree.has("lm_head") and not tree.has("layers.0.mlp.experts.0.gate_proj")
        with pytest.raises(WeightError, match=r"layers\.0\.nonsense"):
            tree.at("layers.0").tensor("nonsense")

    def _pack_experts(tensors: Tensors) -> None:  # type: ignore[misc]
        names = [f"{M}layers.3.mlp.experts.{expert}.down_proj.weight" for expert in range(8)]
        tensors[f"{M}layers.3.mlp.experts.down_proj"] = torch.stack([tensors.pop(name) for name in names])

    def _merge_convs(tensors: Tensors) -> None:  # type: ignore[misc]
        parts = [tensors.pop(f"{M}layers.0.self_attn.{part}_conv1d.weight") for part in "qkv"]
        tensors[f"{M}layers.0.self_attn.conv1d.weight"] = torch.cat(parts)

    @pytest.mark.parametrize(
        ("edit", "names"),
        [
            (lambda t: rename(t, "layers.0.hc_attn_fn", "layers.0.attn_hc.fn"), ["hc_attn_fn", "attn_hc.fn"]),
            (_pack_experts, ["layers.3.mlp.experts.0.down_proj.weight"]),
            (_merge_convs, ["q_conv1d", "self_attn.conv1d"]),
            (
                lambda t: rename(
                    t, "layers.3.mlp.experts.0.up_proj.weight", "layers.3.mlp.experts.0.up.weight"
                ),
                ["layers.3.mlp.experts.0.up_proj.weight", "layers.3.mlp.experts.0.up.weight"],
            ),
            (lambda t: t.pop(f"{M}norm.weight"), ["norm.weight: missing"]),
            (lambda t: t.pop(f"{M}layers.4.mlp.experts.7.gate_proj.weight_scale"), ["make no known format"]),
            (lambda t: t.update({f"{M}layers.1.extra": torch.zeros(1)}), ["layers.1.extra: unknown tensor"]),
            (
                lambda t: t.update({"lm_head.weight_scale": torch.ones(1)}),
                ["lm_head.weight: found", "no known"],
            ),
            (lambda t: t.update({f"{M}norm.weight": torch.zeros(65)}), ["norm.weight", "[65]", "[64]"]),
            (lambda t: t.update({"model.norm.weight": torch.zeros(64)}), ["norm.weight", "same parameter"]),
        ],
        ids=[
            "renamed",
            "experts packed",
            "convs merged",
            "weight without scale",
            "weight deleted",
            "scale deleted",
            "stray",
            "scale placeholder",
            "wrong shape",
            "twice",
        ],
    )
    def test_tensors_dropped_in_silence_after_a_rename(
        self, tmp_path: Path, edit: Callable[[Tensors], Any], names: list[str]
    ) -> None:
        """Field bug A6: every deviation stops with the names."""
        with pytest.raises(WeightError) as error:
            load(edited(tmp_path, edit))
        for name in names:
            assert name in str(error.value)

    def test_a_tensor_in_two_shards_is_refused(self, tmp_path: Path) -> None:
        directory = edited(tmp_path, lambda tensors: None)
        first, second = sorted(directory.glob("model-*.safetensors"))
        name = next(iter(load_file(first)))
        save_file(load_file(second) | {name: load_file(first)[name]}, second)
        with pytest.raises(WeightError, match="is in both"):
            load(directory)

    def test_mixed_formats_in_one_stack_are_refused_with_both(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors) -> None:
            stem = f"{M}layers.8.mlp.experts.5.up_proj.weight"
            tensors[stem] = torch.zeros(64, 64, dtype=torch.bfloat16)
            del tensors[stem + "_scale"], tensors[stem + "_scale_2"]

        with pytest.raises(WeightError, match=r"stored as plain.*as nvfp4"):  # from headers alone
            load(edited(tmp_path, edit))

    def test_quantised_parts_are_expanded_where_rows_are_fused(self) -> None:
        names = ["gate_proj", "up_proj"]
        fused, parts = (load(DATA / "modelopt").at("layers.3.mlp.experts.0") for _ in range(2))
        rows = fused.fused(names).tensor
        assert torch.equal(rows, torch.cat([parts.linear(name).expand(rows.dtype) for name in names]))


class TestFiles:
    """Damaged directories."""

    def test_overlapping_tensors_in_a_shard(self, tmp_path: Path) -> None:
        directory = edited(tmp_path, lambda tensors: None)
        shard = directory / "model-00001-of-00002.safetensors"
        content = shard.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        first, second = sorted(
            (n for n in header if n != "__metadata__" and header[n]["shape"] == [64, 32]),
            key=lambda n: header[n]["data_offsets"],
        )[:2]
        header[second]["data_offsets"] = header[first]["data_offsets"]
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        with pytest.raises(WeightError, match="overlap"):
            load(directory)

    def test_missing_shard(self, tmp_path: Path) -> None:
        directory = edited(tmp_path, lambda tensors: None)
        (directory / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(WeightError, match="model-00002-of-00002"):
            load(directory)

    @pytest.mark.parametrize("keep", [-1, 1000, 4])
    def test_truncated_shard(self, tmp_path: Path, keep: int) -> None:
        shard = edited(tmp_path, lambda tensors: None) / "model-00001-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:keep])
        with pytest.raises(WeightError, match="download it again"):
            load(shard.parent)

    def test_broken_header(self, tmp_path: Path) -> None:
        shard = edited(tmp_path, lambda tensors: None) / "model-00001-of-00002.safetensors"
        content = bytearray(shard.read_bytes())
        content[8:12] = b"?!?!"
        shard.write_bytes(content)
        with pytest.raises(WeightError, match="broken header"):
            load(shard.parent)

    def test_a_name_twice_in_one_header(self, tmp_path: Path) -> None:
        shard = edited(tmp_path, lambda tensors: None) / "model-00001-of-00002.safetensors"
        content = shard.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        name, entry = list(json.loads(content[8:end]).items())[-1]
        header = content[8:end].rstrip()[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}".encode()
        shard.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
        with pytest.raises(WeightError, match="is there 2 times"):
            load(shard.parent)

    def test_no_weights_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_bytes((DATA / "bf16" / "config.json").read_bytes())
        with pytest.raises(WeightError, match="neither"):
            load(tmp_path)

    def test_unknown_quant_method(self, tmp_path: Path) -> None:
        directory = edited(tmp_path, lambda tensors: None)
        config = directory / "config.json"
        config.write_text(
            config.read_text().replace('"modelopt",\n  "quant_algo"', '"bitsandbytes",\n  "quant_algo"')
        )
        with pytest.raises(ConfigError, match="bitsandbytes"):
            load(directory)


def as_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes and one scale for a matrix smaller than a block."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale.view(1, 1)


MTP_FORMATS = ["bf16", "fp8", "mxfp8", "absent"]


def store_mtp(tensors: Tensors, form: str) -> None:
    """Replace the MTP experts' NVFP4 by another format, or drop the layer."""
    reference = load(DATA / "modelopt").at("layers.8.mlp")
    for name in [name for name in tensors if f"{M}layers.8." in name]:
        if form == "absent" or ".experts." in name:
            del tensors[name]
    for projection in ("gate_proj", "up_proj", "down_proj") if form != "absent" else ():
        for expert, weight in enumerate(reference.experts(projection).expand(torch.float32)):
            name = f"{M}layers.8.mlp.experts.{expert}.{projection}.weight"
            if form == "bf16":
                tensors[name] = weight.bfloat16()
            elif form == "fp8":
                tensors[name], tensors[name + "_scale_inv"] = as_fp8(weight)
            else:
                tensors[name] = weight.to(torch.float8_e4m3fn)
                tensors[name + "_scale"] = torch.full((64, 2), 127, dtype=torch.uint8)


@pytest.mark.parametrize("prefix", [M, "model."])
@pytest.mark.parametrize("form", MTP_FORMATS)
def test_mtp_layer_in_its_own_precision_under_another_prefix(tmp_path: Path, form: str, prefix: str) -> None:
    """Field bug A5: precision follows the MTP layer's tensors, and the trunk never sees it."""

    def edit(tensors: Tensors) -> None:
        store_mtp(tensors, form)
        for name in [name for name in tensors if name.startswith(M)]:
            tensors[prefix + name.removeprefix(M)] = tensors.pop(name)

    directory = edited(tmp_path, edit)
    config = load_config(directory)
    tree = load(directory, linear_dtype=torch.float32, with_mtp=False)
    trunk = Glm5Next(tree, config, torch.float32, CPU)
    tree.finish()
    original, _ = driver.load_model(DATA / "modelopt")
    tokens = list(range(3, 40))
    assert torch.equal(driver.logits(trunk, tokens), driver.logits(original, tokens))
    if form == "absent":
        with pytest.raises(WeightError, match="no MTP layer"):
            load(directory)
        return
    stack = load(directory).at("layers.8.mlp").experts("down_proj")
    expected = {"bf16": PlainWeight, "fp8": Fp8BlockWeight, "mxfp8": Mxfp8Weight}
    assert type(stack) is expected[form]
    reference = load(DATA / "modelopt").at("layers.8.mlp").experts("down_proj").expand(torch.float32)
    # FP8 keeps three mantissa bits: half a step is 1/16 of the value; below its smallest value, 2^-10.
    torch.testing.assert_close(stack.expand(torch.float32), reference, rtol=1 / 16, atol=2**-10)


def test_a_damaged_mtp_layer_stops_drafts_only(tmp_path: Path) -> None:
    directory = edited(tmp_path, lambda tensors: tensors.pop(f"{M}layers.8.enorm.weight"))
    load(directory, with_mtp=False)
    with pytest.raises(WeightError, match=r"layers\.8\.enorm\.weight: missing"):
        load(directory)


@pytest.mark.parametrize("placeholder", [False, True])
def test_draft_head_is_the_trunks_absent_or_not(tmp_path: Path, placeholder: bool) -> None:
    """Field bug A7: one head in memory, finite draft logits, the draft norm not the trunk's."""

    def edit(tensors: Tensors) -> None:
        if placeholder:
            tensors[f"{M}layers.8.shared_head.head.weight"] = torch.full((256, 64), math.nan)

    trunk, mtp = driver.load_model(edited(tmp_path, edit))
    drafter = driver.Drafter(mtp, driver.Sequencer(trunk, 16))
    prompt = [5, 6, 7, 8]
    drafter.feed(prompt, drafter.sequencer.feed(prompt))
    _, logits = drafter.draft(9, 2, share=True)
    assert logits.isfinite().all()
    assert not torch.equal(mtp.norm, trunk.norm)
    assert mtp.norm.data_ptr() != trunk.norm.data_ptr()


def test_peak_memory_is_the_weights_and_little_more(tmp_path: Path) -> None:
    """Anonymous memory of a process that loads a checkpoint of 1 GB."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    script = root / "tests" / "measure_loading.py"
    output = subprocess.check_output([sys.executable, str(script), str(tmp_path)], env=environment, text=True)
    file_bytes, final_bytes, largest_bytes, peak_bytes = map(int, output.split())
    assert file_bytes > 1_000_000_000
    assert 0.9 * final_bytes < peak_bytes <= final_bytes + largest_bytes + 300_000_000
