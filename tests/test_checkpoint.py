"""Checkpoint folders: every fault is named, all of them at once; tensors read back exactly, one at a time."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from shards import POINTER, shard

from mkpack.checkpoint import INDEX, SINGLE, Checkpoint, index_shards
from mkpack.errors import UserError
from mkpack.spec import SourcePart, TensorRole

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def index_of(weight_map: dict[str, str]) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


@pytest.fixture
def folder(tmp_path) -> Path:
    """A sound checkpoint of two shards: a, b in the first, c in the second."""
    write(tmp_path, "config.json", b'{"model_type": "mixtral"}')
    write(tmp_path, ONE, shard({"a": ("F32", [2, 3]), "b": ("BF16", [4])}))
    write(tmp_path, TWO, shard({"c": ("F16", [3, 2])}))
    write(tmp_path, INDEX, index_of({"a": ONE, "b": ONE, "c": TWO}))
    return tmp_path


def write(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        Checkpoint.open(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_sound_folder(folder):
    write(folder, "generation_config.json", b'{"eos_token_id": 2}')
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == {"model_type": "mixtral"}
    assert checkpoint.generation_config == {"eos_token_id": 2}
    assert list(checkpoint.tensors) == ["a", "b", "c"]
    a = checkpoint.tensors["a"]
    assert (a.dtype, a.shape, a.file, a.nbytes) == ("F32", (2, 3), ONE, 24)
    assert (checkpoint.shards, checkpoint.stray) == ((ONE, TWO), ())


def test_a_single_file(folder):
    for name in (INDEX, ONE):
        (folder / name).unlink()
    (folder / TWO).rename(folder / SINGLE)
    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.tensors) == ["c"]
    assert checkpoint.generation_config == {}


def test_the_index_wins_over_stray_files(folder):
    write(folder, SINGLE, shard({"a": ("F32", [9])}))
    write(folder, "adapter.safetensors", b"not even safetensors")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.stray == ("adapter.safetensors", SINGLE)
    assert checkpoint.tensors["a"].file == ONE


def test_no_such_folder(tmp_path):
    assert "no such folder" in refused(tmp_path / "absent")


def test_config_is_absent(folder):
    (folder / "config.json").unlink()
    assert "config.json is absent" in refused(folder)


def test_hf_quant_config(folder):
    assert Checkpoint.open(folder).hf_quant_config == {}
    write(folder, "hf_quant_config.json", b'{"quantization": {"quant_algo": "NVFP4"}}')
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.hf_quant_config == {"quantization": {"quant_algo": "NVFP4"}}
    assert "hf_quant_config.json" in checkpoint.digests() and "hf_quant_config.json" not in checkpoint.aux_files()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "not readable as JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe{", "not readable"),
        (b"[" * 200_000, ""),
    ],
)
def test_unreadable_json(folder, name, text, said):
    write(folder, name, text)
    assert name in refused(folder) and said in refused(folder)


@pytest.mark.parametrize(
    "text", [b"{", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}']
)
def test_unreadable_index(folder, text):
    write(folder, INDEX, text)
    assert INDEX in refused(folder)


def test_an_absent_shard_is_named_with_its_tensors(folder):
    (folder / ONE).unlink()
    assert f"{ONE} is absent; {INDEX} places a, b in it" in refused(folder)


def test_an_absent_shard_of_many_tensors(folder):
    write(folder, INDEX, index_of({"c": TWO} | {f"t{i}": ONE for i in range(10)}))
    (folder / ONE).unlink()
    assert "places t0, t1, t2 and 7 more in it" in refused(folder)


def test_a_tensor_that_its_shard_lacks(folder):
    write(folder, INDEX, index_of({"a": ONE, "b": ONE, "c": TWO, "d": TWO}))
    assert f'"d" is not in {TWO}' in refused(folder)


def test_a_tensor_the_index_lacks(folder):
    write(folder, INDEX, index_of({"a": ONE, "c": TWO}))
    assert f'"b" in {ONE} is not in {INDEX}' in refused(folder)


def test_a_tensor_in_two_shards(folder):
    write(folder, TWO, shard({"c": ("F16", [3, 2]), "a": ("F32", [2, 3])}))
    assert f'"a" is in both {ONE} and {TWO}' in refused(folder)


def test_a_tensor_twice_in_the_index(folder):
    write(folder, INDEX, b'{"weight_map": {"a": "%b", "a": "%b"}}' % (ONE.encode(), TWO.encode()))
    assert f'{INDEX}: "a" is listed twice' in refused(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a//x.safetensors", "x.bin", "a\\x.safetensors"]
)
def test_an_index_that_leaves_the_folder(folder, name):
    write(folder, INDEX, index_of({"a": name}))
    assert "is not the name of a .safetensors file" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX, TWO])
def test_a_git_lfs_pointer(folder, name):
    write(folder, name, POINTER)
    assert f"{name} is a Git LFS pointer" in refused(folder) and "git lfs pull" in refused(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_only_pickled_weights(tmp_path, name):
    write(tmp_path, "config.json", b"{}")
    write(tmp_path, name, b"pickle")
    text = refused(tmp_path)
    assert name in text and "convert to safetensors" in text


def test_no_weights_at_all(tmp_path):
    write(tmp_path, "config.json", b"{}")
    text = refused(tmp_path)
    assert "no weights" in text and SINGLE in text and INDEX in text


def test_shards_without_their_index(folder):
    (folder / INDEX).unlink()
    text = refused(folder)
    assert ONE in text and "the index is absent" in text


def test_all_faults_are_in_one_message(folder):
    (folder / "config.json").unlink()
    write(folder, "tokenizer.json", POINTER)
    os.truncate(folder / ONE, (folder / ONE).stat().st_size - 5)
    (folder / TWO).unlink()
    text = refused(folder)
    assert "4 problems" in text
    for said in ("config.json is absent", "tokenizer.json is a Git LFS", f"{ONE} is truncated", f"{TWO} is absent"):
        assert said in text


def role(source: str, *shape: int) -> TensorRole:
    return TensorRole(f"canonical.{source}", source, shape, "dense")


SOUND = [role("a", 2, 3), role("b", 4), role("c", 3, 2)]


def test_check_accepts_what_fits(folder):
    Checkpoint.open(folder).check(SOUND)


def test_check_names_every_mismatch(folder):
    write(folder, TWO, shard({"c": ("I64", [3, 2])}))
    with pytest.raises(UserError) as caught:
        Checkpoint.open(folder).check([role("a", 2, 3), role("b", 5), role("c", 3, 2), role("d", 7, 1)])
    text = str(caught.value)
    assert "3 problems" in text
    assert '"d" is missing, expected shape [7, 1]' in text
    assert f'"b" in {ONE}: expected shape [5] by config.json, found [4]' in text
    assert f'"c" in {TWO}: expected dtype F32, F16, BF16, found I64' in text


def test_check_cuts_a_long_list_but_hides_no_other_kind(folder):
    with pytest.raises(UserError) as caught:
        Checkpoint.open(folder).check([*(role(f"x{i}", 1) for i in range(1000)), role("a", 9, 9)])
    text = str(caught.value)
    assert "1001 problems" in text and "and 980 more like these" in text and '"a" in' in text
    assert len(text.splitlines()) == 1 + 20 + 1 + 1


def test_unused(folder):
    assert Checkpoint.open(folder).unused([role("b", 4)]) == ["a", "c"]


def test_read_numpy_gives_the_file_bytes(folder):
    checkpoint = Checkpoint.open(folder)
    raw = bytes(range(24))
    assert np.array_equal(checkpoint.read_numpy("a"), np.frombuffer(raw, "<f4").reshape(2, 3))
    bits, half = checkpoint.read_numpy("b"), checkpoint.read_numpy("c")
    assert (bits.dtype, bits.shape, bits.tobytes()) == (np.uint16, (4,), raw[:8])
    assert (half.dtype, half.shape, half.tobytes()) == (np.float16, (3, 2), raw[:12])


def test_read_agrees_with_the_safetensors_package(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    write(tmp_path, "config.json", b"{}")
    saved = {
        "w": torch.randn(5, 7),
        "h": torch.randn(3, 1, 2).half(),
        "b": torch.randn(48).bfloat16(),
        "one": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    save_file(saved, tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors.keys() == saved.keys()
    for name, expected in saved.items():
        found = checkpoint.read(name)
        assert found.dtype == expected.dtype and torch.equal(found, expected)
        assert checkpoint.read_numpy(name).shape == tuple(expected.shape)
    # Memory of its own: writing to it changes neither the file nor the next read.
    checkpoint.read("w").zero_()
    assert torch.equal(checkpoint.read("w"), saved["w"])


def test_read_refuses_what_it_cannot_give(folder):
    write(folder, TWO, shard({"c": ("F8_E4M3", [3, 2])}))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(UserError, match="F8_E4M3, expected one of F32, F16, BF16"):
        checkpoint.read_numpy("c")
    with pytest.raises(UserError, match='no tensor "layers.a"'):
        checkpoint.read_numpy("layers.a")


def test_a_file_that_shrinks_after_it_was_opened(folder):
    checkpoint = Checkpoint.open(folder)
    os.truncate(folder / ONE, checkpoint.tensors["a"].offset + 10)
    with pytest.raises(UserError, match="should be 24 bytes .* found 10"):
        checkpoint.read_numpy("a")


def test_memory_is_bounded_by_one_tensor(tmp_path):
    """Reading 64 tensors of 4 MiB one after another raises the peak by a few of them, not by the 256 MiB file."""
    write(tmp_path, "config.json", b"{}")
    entries = {
        f"t{i}": {"dtype": "F32", "shape": [1 << 20], "data_offsets": [i << 22, (i + 1) << 22]} for i in range(64)
    }
    text = json.dumps(entries).encode()
    with open(tmp_path / SINGLE, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + (64 << 22))
    script = f"""
import resource
import numpy
from pathlib import Path
from mkpack.checkpoint import Checkpoint
checkpoint = Checkpoint.open(Path({str(tmp_path)!r}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = sum(float(checkpoint.read_numpy(name).sum()) for name in checkpoint.tensors)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root())
    assert int(done.stdout) < 24 << 10


def root() -> Path:
    return Path(__file__).resolve().parents[1]


def test_opening_imports_neither_torch_nor_numpy(folder):
    script = (
        "import sys; from pathlib import Path; from mkpack.checkpoint import Checkpoint; "
        f"Checkpoint.open(Path({str(folder)!r})); print(sorted({{'torch', 'numpy'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root())
    assert done.stdout.strip() == "[]"


AUX = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
       "chat_template.jinja", "LICENSE", "LICENSE-MODEL.txt", "license.md", "NOTICE")  # fmt: skip


def test_aux_files(folder):
    for name in (*AUX, "README.md", "tokenizer.model.bak", "licensed.txt", "merges.txt"):
        write(folder, name, b"{}")
    found = Checkpoint.open(folder).aux_files()
    assert found == {name: folder / name for name in AUX}


def test_digests_cover_every_file_a_build_uses(folder):
    for name in ("tokenizer.json", "LICENSE", "stray.safetensors", "notes.txt"):
        write(folder, name, b"{}")
    seen: list[tuple[int, int]] = []
    used = ["LICENSE", "config.json", ONE, TWO, INDEX, "tokenizer.json"]
    assert Checkpoint.open(folder).digests(lambda *a: seen.append(a)) == {
        name: sha256((folder / name).read_bytes()).hexdigest() for name in used
    }
    total = sum((folder / name).stat().st_size for name in used)
    assert seen == sorted(seen) and seen[-1] == (total, total)


def test_digests_refuse_a_file_that_is_not_what_the_hub_holds(folder):
    checkpoint = Checkpoint.open(folder)
    good = checkpoint.digests()
    assert checkpoint.digests(expected={ONE: good[ONE]}) == good
    with pytest.raises(UserError, match=f"damaged: {TWO}: expected sha256 {good[ONE]}, found {good[TWO]}"):
        checkpoint.digests(expected={ONE: good[ONE], TWO: good[ONE]})


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n# Model", "apache-2.0"),
        ("---\r\nlicense: mit\r\n---\r\n", "mit"),
        ("---\nlicense: other\nlicense_name: big-model-1\n---", "big-model-1"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit AND apache-2.0"),
        ("---\ntags: [x]\n---\n", None),
        ("---\nlicense: {: bad\n---\n", None),
        ("---\n- list\n---\n", None),
        ("# license: mit\n", None),
    ],
)
def test_license_id(folder, readme, expected):
    write(folder, "README.md", readme.encode())
    assert Checkpoint.open(folder).license_id == expected


def test_license_id_without_a_readme(folder):
    assert Checkpoint.open(folder).license_id is None


@given(
    st.binary(max_size=100) | st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_no_index_crashes(value):
    text = value if isinstance(value, bytes) else json.dumps({"weight_map": value}).encode()
    weight_map, problems = index_shards(text)
    assert problems or all(v.endswith(".safetensors") for v in weight_map.values())


# -- parts of fused tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parts_of_fused_tensors_are_read_alone(tmp_path, dtype):
    """Of experts [3 experts, out or in, in or out]: only the bytes of one are read, and the rest of the file is not."""
    whole = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    biases = torch.arange(18.0).reshape(3, 6).to(getattr(torch, dtype))
    save_file({"experts": whole, "biases": biases}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    above = SourcePart((3, 6, 10), 1, range(3))
    odd = SourcePart((3, 6, 10), 2, range(1, 10, 2), transposed=True)
    bias = SourcePart((3, 6), 2, range(0, 6, 2))
    assert torch.equal(checkpoint.read("experts", above), whole[1, :3]) and above.shape == (3, 10)
    assert torch.equal(checkpoint.read("experts", odd), whole[2].T[1::2]) and odd.shape == (5, 6)
    assert torch.equal(checkpoint.read("biases", bias), biases[2, ::2]) and bias.shape == (3,)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Checkpoint.read_bytes
        patch.setattr(Checkpoint, "read_bytes", lambda self, info: asked.append(info.nbytes) or plain(self, info))
        checkpoint.read("experts", odd)
    assert asked == [whole[2].nbytes]


def test_parts_that_share_bytes_are_read_together_once(tmp_path, monkeypatch):
    """gate and up of fused experts, one above the other or interleaved; whatever is no part as ever."""
    whole = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"experts": whole, "w": whole[0].clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint, asked, plain = Checkpoint.open(tmp_path), [], Checkpoint.read_bytes
    monkeypatch.setattr(Checkpoint, "read_bytes", lambda self, info: asked.append(info.nbytes) or plain(self, info))
    for transposed, halves in ((False, (range(3), range(3, 6))), (True, (range(0, 10, 2), range(1, 10, 2)))):
        parts = [SourcePart((3, 6, 10), 1, rows, transposed) for rows in halves]
        roles = [TensorRole("part", "experts", part.shape, "experts", "pair", part) for part in parts]
        asked.clear()
        found = checkpoint.read_together([*roles, TensorRole("w", "w", (6, 10), "experts")])
        assert asked == [whole[1].nbytes, whole[0].nbytes]
        for tensor, part in zip(found, parts, strict=False):
            assert torch.equal(tensor, checkpoint.read("experts", part))
        assert torch.equal(found[2], whole[0])


def test_a_fused_tensor_of_another_shape_is_refused_once(tmp_path):
    save_file({"experts": torch.zeros(3, 6, 9)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    parts = [SourcePart((3, 6, 10), e, range(start, start + 3)) for e in range(3) for start in (0, 3)]
    roles = [TensorRole(f"part{i}", "experts", part.shape, "experts", None, part) for i, part in enumerate(parts)]
    with pytest.raises(UserError) as error:
        Checkpoint.open(tmp_path).check(roles)
    assert str(error.value).count("expected shape [3, 6, 10] by config.json, found [3, 6, 9]") == 1
