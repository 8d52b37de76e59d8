"""The recipe: what is accepted, and that every mistake is named with its file, line and key."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mkpack.errors import UserError
from mkpack.recipe import Recipe, load_recipe, place

SMALL = "name: demo\nsource: {folder: model}\n"
FULL = """\
name: Demo-1.0_x
source:
  repo: org/some.model
  revision: 0123abc
license: apache-2.0
quantise:
  experts: fp8
  dense: nvfp4
  attention: fp8
  lm_head: nvfp4
  embeddings: fp8
  algorithm: mse
  down_input: bf16
calibrate:
  data: ../text
  tokens: 99
  min_tokens: 3
parallel:
  tp: 8
  split: n
targets:
  - x86-64-v4
  - sm_90a
limits:
  context: 16
  tokens_per_step: 1
quality:
  text: ../text/wiki.txt
  tokens: 100
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return path


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(UserError) as error:
        load_recipe(write(folder, text))
    return str(error.value)


def test_defaults(tmp_path: Path) -> None:
    r = load_recipe(write(tmp_path, SMALL))
    assert r.source.folder == tmp_path / "model" and r.source.repo is None
    assert r.quantise.model_dump() == {
        "experts": "nvfp4",
        "dense": "bf16",
        "attention": "bf16",
        "lm_head": "bf16",
        "embeddings": "bf16",
        "algorithm": "max",
        "down_input": None,
    }
    assert "down_input" not in r.precision
    assert (r.parallel.tp, r.parallel.split, r.targets) == (1, "n", ("native",))
    assert (r.limits.context, r.limits.tokens_per_step, r.quality, r.license) == (4096, 16, None, None)
    assert load_recipe(write(tmp_path, "name: a\nsource: {repo: a/b}\n")).source.revision == "main"


def test_every_key(tmp_path: Path) -> None:
    r = load_recipe(write(tmp_path, FULL))
    assert (r.name, r.license, r.source.repo, r.source.revision) == (
        "Demo-1.0_x",
        "apache-2.0",
        "org/some.model",
        "0123abc",
    )
    formats = {"experts": "fp8", "dense": "nvfp4", "attention": "fp8", "lm_head": "nvfp4", "embeddings": "fp8"}
    assert r.precision == {**formats, "down_input": "bf16"}
    assert (r.parallel.tp, r.targets, r.limits.context, r.limits.tokens_per_step) == (8, ("x86-64-v4", "sm_90a"), 16, 1)
    assert r.quality is not None and r.quality.tokens == 100
    assert r.quality.text == tmp_path.parent / "text" / "wiki.txt"


def test_paths_are_relative_to_the_recipe_and_home_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", SMALL)
    assert load_recipe(Path("sub/recipe.yaml")).source.folder == tmp_path / "sub" / "model"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = "name: a\nsource: {folder: ~/m}\nquality: {text: /abs/t.txt}\n"
    r = load_recipe(write(tmp_path, text))
    assert r.source.folder == tmp_path / "home" / "m"
    assert r.quality is not None and r.quality.text == Path("/abs/t.txt")


def test_a_recipe_cannot_be_changed(tmp_path: Path) -> None:
    r = load_recipe(write(tmp_path, SMALL))
    with pytest.raises(ValueError, match="frozen"):
        r.limits.context = 32  # type: ignore[misc]


# Text -> what its only problem says, after "recipe refused: FILE".
BAD = [
    ("name: a\nsource: {folder: m}\nquantize: {experts: fp8}\n", [":3: quantize", 'did you mean "quantise"']),
    (SMALL + "limits:\n  contxt: 99\n", [":4: limits.contxt", 'did you mean "context"']),
    (
        SMALL + "limits:\n  zzzzzz: 99\n",
        [":4: limits.zzzzzz: unknown key", "known keys here: context, tokens_per_step"],
    ),
    ("name: a\nsource:\n  folder: m\n  revison: x\n", [":4: source.revison", 'did you mean "revision"']),
    (SMALL + "quantise:\n  router: fp8\n", [":4: quantise.router", "never quantised"]),
    (SMALL + "quantise:\n  norms: bf16\n", [":4: quantise.norms", "never quantised"]),
    (SMALL + "quantise:\n  experts: nvpf4\n", [":4: quantise.experts", '"nvpf4"', 'did you mean "nvfp4"', "fp8, bf16"]),
    (SMALL + "quantise: {down_input: fp8}\n", [":3: quantise.down_input", "one of bf16, nvfp4", '"fp8"']),
    (SMALL + "quantise:\n  down_input:\n", [":4: quantise.down_input", "found nothing"]),
    (SMALL + "quantise: {lm_head: 8}\n", [":3: quantise.lm_head", "one of bf16, fp8, nvfp4", "the number 8"]),
    (SMALL + "quantise: nvfp4\n", [":3: quantise", "experts, dense, attention", 'found "nvfp4"']),
    (SMALL + "quantise:\n", [":3: quantise", "found nothing"]),
    (SMALL + "license:\n", [":3: license", "found nothing"]),
    (SMALL + "license: 2.0\n", [":3: license", "the number 2.0", "in quotes"]),
    ("name: a\nsource: {dummy: c.json, folder: m}\n", [":2: source", "folder and dummy", "(and seed)"]),
    ("name: a\nsource: {repo: a/b, revision: v, dummy: c.json}\n", [":2: source", "repo, revision and dummy"]),
    ("name: a\nsource: {folder: m, seed: 1}\n", [":2: source", "folder and seed", "remove"]),
    ("name: a\nsource: {seed: 1}\n", [":2: source", "dummy: config.json", "none of them"]),
    ("name: a\nsource: {dummy: }\n", [":2: source.dummy", "path of a config.json", "found nothing"]),
    ("name: a\nsource: {dummy: c.json, seed: -1}\n", [":2: source.seed", "from 0 to 2^63 - 1", "the number -1"]),
    ("name: a\nsource: {dummy: c.json, seed: 1.5}\n", [":2: source.seed", "whole number", "1.5"]),
    (SMALL + "quality:\n", [":3: quality", "text, tokens", "found nothing"]),
    (SMALL + "quality: {text: t, tokens: 1}\n", [":3: quality.tokens", "at least 2", "the number 1"]),
    (SMALL + "quality: {text: ''}\n", [":3: quality.text", "path of a text file"]),
    (SMALL + "parallel:\n  tp: 9\n", [":4: parallel.tp", "from 1 to 8", "the number 9"]),
    (SMALL + "parallel:\n  tp: true\n", [":4: parallel.tp", "the truth value true"]),
    (SMALL + "parallel:\n  split: k\n", [":4: parallel.split", 'found "k"']),
    (SMALL + "limits: {context: 15}\n", [":3: limits.context", "at least 16", "the number 15"]),
    (SMALL + "limits: {context: 4096.0}\n", [":3: limits.context", "whole number", "4096.0"]),
    (SMALL + "limits: {context: '4096'}\n", [":3: limits.context", '"4096"']),
    (SMALL + "limits: {tokens_per_step: 17}\n", [":3: limits.tokens_per_step", "from 1 to 16", "17"]),
    (SMALL + "limits: [1]\n", [":3: limits", "a list of 1"]),
    (SMALL + "targets: []\n", [":3: targets", "one or more", "an empty list"]),
    (SMALL + "targets: native\n", [":3: targets", "a list", '"native"']),
    (SMALL + "targets:\n- native\n- sm_90\n", [":5: targets.1", '"sm_90"', 'did you mean "sm_90a"']),
    (SMALL + "targets: [cuda]\n", [":3: targets.0", '"cuda"']),
    (SMALL + "targets: [native, sm_90a, native]\n", [":3: targets", "native more than once"]),
    ("source: {folder: m}\n", [":1: name: missing key", "file name"]),
    ("name: a\n", [":1: source: missing key", "repo", "folder"]),
    ("name: a/b\nsource: {folder: m}\n", [":1: name", '"a/b"', "file name"]),
    ("name: ..\nsource: {folder: m}\n", [":1: name", '".."']),
    ("name: 12\nsource: {folder: m}\n", [":1: name", "the number 12", "in quotes"]),
    ("name: a\nsource: m\n", [":2: source", "either repo", 'found "m"']),
    ("name: a\nsource: {}\n", [":2: source", "either repo", "none of them"]),
    ("name: a\nsource: {revision: main}\n", [":2: source", "either repo", "none of them"]),
    ("name: a\nsource:\n  repo: a/b\n  folder: m\n", [":2: source", "repo and folder", "remove"]),
    ("name: a\nsource: {folder: m, revision: x}\n", [":2: source", "revision and folder"]),
    ("name: a\nsource: {repo: justname}\n", [":2: source.repo", "org/name", '"justname"']),
    ("name: a\nsource: {repo: ../../etc}\n", [":2: source.repo", "org/name"]),
    ("name: a\nsource: {repo: }\n", [":2: source.repo", "found nothing"]),
    ("name: a\nsource: {repo: a/b, revision: 1234567}\n", [":2: source.revision", "1234567", "in quotes"]),
    ("name: a\nsource: {folder: [m]}\n", [":2: source.folder", "path", "a list of 1"]),
    ('name: a\nsource: {folder: "a\\0b"}\n', [":2: source.folder", "path"]),
    ("name: a\nname: b\nsource: {folder: m}\n", [":2: name: duplicate key", "line 1"]),
    (SMALL + "limits:\n  context: 32\n  context: 32\n", [":5: limits.context: duplicate key", "line 4"]),
    ("name: a\nsource: &s {folder: m}\nquality: *s\n", [":3: quality", "alias"]),
    ("name: a\nsource: {folder: m}\n<<: {license: x}\n", [":3: <<: unknown key"]),
    ("name: a\nsource: {folder: m}\n1: x\n", [":3: 1: unknown key"]),
    ("name: a\nsource: {folder: m}\n[a]: x\n", [":3: ", "key name", "section or list"]),
    ("name: 2000-99-99\nsource: {folder: m}\n", [":1: name", "cannot read", "2000-99-99"]),
    ("name: !!python/name:os.system x\nsource: {folder: m}\n", [":1: name", "cannot read"]),
    ("name: a\nsource:\n\tfolder: m\n", [":3: ", "tab", "spaces"]),
    ("name: a\nsource: {folder: m\n", [":2: not YAML"]),
    ("name: a\nsource: {folder: m}\n x: 1\n", [":3: not YAML"]),
    ("name: a\n---\nname: b\n", [":2: ", "second"]),
    ("name: \x07\n", [":1: not YAML", "does not allow"]),
    ("[" * 1200, [":1: nested too deep"]),
    ("", [":1: ", "empty file"]),
    ("# only a comment\n", [":1: ", "empty file"]),
    ("\n\njust text\n", [":3: ", 'the text "just text"']),
    ("- name: a\n", [":1: ", "found a list"]),
    (b"name: \xff\n", ["UTF-8", "byte 6"]),
]


@pytest.mark.parametrize("text, said", BAD, ids=[" ".join(said)[:50] for _, said in BAD])
def test_each_mistake_is_named(tmp_path: Path, text: str | bytes, said: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(f"recipe refused: {tmp_path / 'recipe.yaml'}:") and "\n" not in message, message
    for part in said:
        assert part in message


def test_all_mistakes_in_one_message_in_the_order_of_lines(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        """\
        name: a b
        limits:
          context: 1
          context: 2
        source:
          folder: m
          repo: x
        targets: [native, cuda]
        quantise: {router: fp8, experts: int4, atention: fp8}
        colour: red
        """,
    )
    first, *rest = message.splitlines()
    assert first == "recipe refused: 10 problems"
    keys = ["name", "limits.context", "limits.context", "source", "source.repo", "targets.1"]
    found = [line.split(":")[1:3] for line in rest]
    assert [k.strip() for _, k in found[:6]] == keys
    assert [int(line) for line, _ in found] == [1, 3, 4, 5, 7, 8, 9, 9, 9, 10]


def test_a_bad_list_is_reported_by_its_items_alone(tmp_path: Path) -> None:
    message = refusal(tmp_path, SMALL + "targets:\n- cuda\n- 3\n")
    assert [line.split(": ")[1] for line in message.splitlines()[1:]] == ["targets.0", "targets.1"]


def test_a_key_is_found_again_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    lines = FULL.splitlines()
    for key in ("source.repo", "limits.context", "quality.text", "parallel.tp", "targets"):
        line = 1 + next(i for i, row in enumerate(lines) if row.strip().startswith(key.split(".")[-1] + ":"))
        assert place(path, key) == f"{path}:{line}: {key}"
    assert place(write(tmp_path, SMALL + "limits: {}\n"), "limits.context") == f"{path}:3: limits.context"
    assert place(path, "parallel.tp") == f"{path}:1: parallel.tp"  # left out


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no.yaml", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(UserError, match=said) as error:
            load_recipe(path)
        assert str(path) in str(error.value)


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode()
    assert load_recipe(write(tmp_path, text)).name == "demo"
    assert ":3: x" in refusal(tmp_path, text + b"x: 1\r\n")


def test_canonical_text_leaves_out_paths_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    extra = "quality: {text: t.txt, tokens: 9}\n"
    one = load_recipe(write(tmp_path / "a", SMALL + extra)).canonical_text()
    two = load_recipe(write(tmp_path / "b", SMALL.replace("model", "elsewhere") + extra)).canonical_text()
    assert one == two and str(tmp_path) not in one and "model" not in one
    assert json.loads(one)["quality"] == {"tokens": 9}
    random = "name: demo\nsource: {dummy: model, seed: 0}\n"
    one, two, default = (
        load_recipe(write(tmp_path, text)).canonical_text()
        for text in (random, random.replace("0", "1"), random.replace(", seed: 0", ""))
    )
    assert one == default != two and "model" not in one and str(tmp_path) not in one
    base = load_recipe(write(tmp_path, FULL)).canonical_text()
    for old, new in [
        ("Demo-1.0_x", "other"),
        ("0123abc", "main"),
        ("org/some", "org/other"),
        ("apache-2.0", "mit"),
        ("experts: fp8", "experts: bf16"),
        ("dense: nvfp4", "dense: bf16"),
        ("tp: 8", "tp: 4"),
        ("sm_90a", "sm_100a"),
        ("context: 16", "context: 17"),
        ("step: 1", "step: 2"),
        ("tokens: 100", "tokens: 101"),
        ("algorithm: mse", "algorithm: max"),
        ("tokens: 99", "tokens: 98"),
        ("min_tokens: 3", "min_tokens: 4"),
    ]:
        assert FULL.count(old) == 1
        assert load_recipe(write(tmp_path, FULL.replace(old, new))).canonical_text() != base


_format = st.sampled_from(["bf16", "fp8", "nvfp4"])
_name = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9._-]{0,20}\Z").filter(lambda s: isinstance(yaml.safe_load(s), str))
_recipes = st.fixed_dictionaries(
    {
        "name": _name,
        "source": st.one_of(
            st.fixed_dictionaries({"folder": st.sampled_from(["m", "../m", "/a/b"])}),
            st.fixed_dictionaries({"dummy": st.just("c.json")}, optional={"seed": st.integers(0, 2**63 - 1)}),
            st.fixed_dictionaries(
                {"repo": st.just("org/name")}, optional={"revision": st.sampled_from(["main", "v1"])}
            ),
        ),
    },
    optional={
        "license": st.sampled_from(["mit", "apache-2.0"]),
        "quantise": st.fixed_dictionaries(
            {}, optional={k: _format for k in ("experts", "dense", "attention", "lm_head", "embeddings")}
        ),
        "parallel": st.fixed_dictionaries({}, optional={"tp": st.integers(1, 8), "split": st.just("n")}),
        "targets": st.lists(st.sampled_from(["x86-64-v3", "x86-64-v4", "sm_90a", "native"]), min_size=1, unique=True),
        "limits": st.fixed_dictionaries(
            {}, optional={"context": st.integers(16, 10**6), "tokens_per_step": st.integers(1, 16)}
        ),
        "quality": st.fixed_dictionaries({"text": st.just("t.txt")}, optional={"tokens": st.integers(2, 999)}),
    },
)
PATHS = (("source", "folder"), ("source", "dummy"), ("quality", "text"))
quick = settings(max_examples=60)


def paths(data: Any, where: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Key paths of all sections and values, deepest last."""
    if not isinstance(data, dict):
        return []
    return [p for k, v in data.items() for p in [(*where, k), *paths(v, (*where, k))]]


def section(data: dict[str, Any], where: tuple[str, ...]) -> dict[str, Any]:
    for key in where:
        data = data[key]
    return data


@quick
@given(data=_recipes, order=st.randoms(use_true_random=False), flow=st.booleans())
def test_valid_recipes_load_and_say_what_was_written(tmp_path: Path, data: Any, order: Any, flow: bool) -> None:
    recipe = load_recipe(write(tmp_path, yaml.safe_dump(data, default_flow_style=flow)))
    for where in paths(data):
        value: Any = recipe
        for key in where:
            value = getattr(value, key)
        written = section(data, where[:-1])[where[-1]]
        if where in PATHS:
            assert value.is_absolute() and value.name == Path(written).name
        elif not isinstance(written, dict):
            assert value == (tuple(written) if isinstance(written, list) else written)
    shuffled = list(data.items())
    order.shuffle(shuffled)
    again = load_recipe(write(tmp_path, yaml.safe_dump(dict(shuffled), sort_keys=False)))
    assert again == recipe and again.canonical_text() == recipe.canonical_text()
    assert Recipe.model_validate(recipe.model_dump(exclude_none=True)) == recipe


@quick
@given(data=_recipes, draw=st.data())
def test_a_misspelt_key_is_refused_with_its_line_and_the_right_one(tmp_path: Path, data: Any, draw: Any) -> None:
    where = draw.draw(st.sampled_from(paths(data)))
    key = where[-1]
    i = draw.draw(st.integers(0, len(key) - 1))
    wrong = draw.draw(st.sampled_from([key[:i] + "x" + key[i:], key + "s", key.upper() if len(key) > 3 else key + "_"]))
    parent = section(data, where[:-1])
    parent[wrong] = parent.pop(key)
    text = yaml.safe_dump(data, default_flow_style=False, sort_keys=False)
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row.strip().startswith(f"{wrong}:"))
    message = refusal(tmp_path, text)
    problem = next(row for row in message.splitlines() if "unknown key" in row)
    assert f"recipe.yaml:{line}: {'.'.join((*where[:-1], wrong))}: unknown key" in problem
    assert key in problem


@quick
@given(data=_recipes, draw=st.data())
def test_a_wrong_value_is_refused_with_its_line_and_key(tmp_path: Path, data: Any, draw: Any) -> None:
    where = draw.draw(st.sampled_from(paths(data)))
    junk = st.sampled_from([None, -1, 1.5, False, [], ["x"], [[1]], {"x": 1}, "no such value"])
    value = draw.draw(junk)
    # Free text is right for these.
    if isinstance(value, str) and where in (("license",), *PATHS):
        return
    section(data, where[:-1])[where[-1]] = value
    text = yaml.safe_dump(data, default_flow_style=False, sort_keys=False)
    message = refusal(tmp_path, text)
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row.strip().startswith(f"{where[-1]}:"))
    problem = next(row for row in message.splitlines() if f": {'.'.join(where)}" in row)
    assert int(problem.split("recipe.yaml:")[1].split(":")[0]) >= line
    assert "expected" in problem or "unknown key" in problem


@quick
@given(text=st.one_of(st.text(max_size=40), st.text(alphabet="ab:\n -[]{}#&*!|>'\"%@`,?\t<", max_size=40)))
def test_any_text_is_refused_as_a_user_error(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, text.encode("utf-8", "surrogatepass"))
    assert str(tmp_path / "recipe.yaml") in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("calibrate: {data: 5}", "calibrate.data: expected default, or the path of a text file"),
        ("calibrate: {data: }", "calibrate.data: expected default, or the path"),
        ("calibrate: {tokns: 5}", 'calibrate.tokns: unknown key (did you mean "tokens"?)'),
        ("calibrate: {tokens: 0}", "calibrate.tokens: expected a whole number of at least 1, found the number 0"),
        ("calibrate:", "calibrate: expected a section with some of the keys data, tokens, min_tokens, found nothing"),
        ("quantise: {algorithm: mean}", "quantise.algorithm: expected one of max, mse"),
    ],
)
def test_calibration_and_algorithm_are_read_strictly(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, SMALL + text + "\n"))
    assert f":{len(SMALL.splitlines()) + 1}: {expected}" in str(caught.value)


def test_the_data_of_a_calibration_is_a_path_or_ours(tmp_path: Path) -> None:
    for text, expected in (("", None), ("data: default", None), ("data: a.txt", tmp_path / "a.txt")):
        found = load_recipe(write(tmp_path, f"{SMALL}calibrate: {{{text}}}\n")).calibrate
        assert found and found.data == expected and (found.tokens, found.min_tokens) == (2048, 8)
