"""Model and Generation with a fake kernel: streaming, conversations, cancelling, errors."""

from __future__ import annotations

import functools
import gc
import signal
import subprocess
import sys
import threading

import fake
import numpy as np
import pytest
from fake import CENTIGRADE, CONTEXT, END, FAIL, HELLO, MAX_NEW, SEED, SPEC, TARGET, TOP_K, VOCAB, WAIT, ids
from patience import PATIENCE_S, until

import mkpack
from mkpack.artifact import extract
from mkpack.errors import InternalError, UserError
from mkpack.loader import load
from mkpack.native import Run


@pytest.fixture
def make(tmp_path):
    return functools.partial(fake.artifact, tmp_path)


# --- generating --------------------------------------------------------------------------------------------------


def test_text_streams_and_the_result_is_told(make):
    with load(make(HELLO), threads=3) as model:
        assert (model.context, model.length, model.spec, model.target) == (CONTEXT, 0, SPEC, TARGET)
        generation = model.generate("Hi", seed=5)
        assert generation.result is None
        pieces = list(generation)
        assert pieces == ["H", "é", "l", "l", "o", " ", "😀", "!"]
        result = generation.result
        assert result is not None
        assert (result.stop_reason, result.num_new_tokens, result.tokens) == ("stop", len(HELLO), tuple(HELLO))
        assert (result.num_prompt_tokens, result.num_cached_tokens) == (len(ids("<user>Hi<end>")), 0)
        assert (result.prefill_s, result.decode_s, result.seed) == (0.5, 0.25, 5)
        assert model.length == len(ids("<user>Hi<end>")) + len(HELLO) - 1
        assert model.read_bandwidth() == 3e9


def test_an_unpacked_folder_runs_alike(make, tmp_path):
    extract(make(HELLO), tmp_path / "folder")
    with mkpack.load(tmp_path / "folder") as model:
        assert "".join(model.generate("Hi")) == "Héllo 😀!"


def test_prompt_forms(make):
    with load(make(HELLO)) as model:
        for prompt, raw, expected in (
            ("Hi", True, ids("Hi")),
            ("Hi", False, ids("<user>Hi<end>")),
            ([{"role": "user", "content": "Hi"}], False, ids("<user>Hi<end>")),
            ([1, 2, 3], False, [1, 2, 3]),
        ):
            generation = model.generate_tokens(prompt, raw=raw)
            assert list(generation) == HELLO
            assert generation.result.num_prompt_tokens == len(expected)
            assert "".join(model.generate(prompt, raw=raw)) == "Héllo 😀!"


def test_a_new_generation_begins_from_an_empty_cache(make):
    with load(make(HELLO)) as model:
        for _ in range(2):
            list(model.generate_tokens([1, 2, 3]))
            assert model.length == 3 + len(HELLO) - 1


def test_length_and_a_full_context_end_with_length(make):
    with load(make(ids("ab"))) as model:
        generation = model.generate([1, 2], max_new_tokens=5)
        assert "".join(generation) == "ababa"
        assert generation.result.stop_reason == "length"
        for options in ({}, {"max_new_tokens": 10_000}):
            generation = model.generate_tokens([1] * 60, **options)
            assert len(list(generation)) == CONTEXT - 60 + 1
            assert generation.result.stop_reason == "length"
        assert model.length == CONTEXT
        generation = model.generate_tokens([1] * CONTEXT)
        assert len(list(generation)) == 1 and generation.result.stop_reason == "length"


def test_bytes_cut_by_the_end_are_replaced(make):
    with load(make([*ids("a😀")[:3], END])) as model:
        assert "".join(model.generate("Hi")) == "a\ufffd"


def test_stop_tokens_can_be_chosen_and_are_not_shown(make):
    with load(make(ids("abc") + [END])) as model:
        generation = model.generate("Hi", stop_tokens=ids("b"))
        assert "".join(generation) == "a"
        assert generation.result.tokens == tuple(ids("ab"))
        assert len("".join(model.generate("Hi", stop_tokens=[], max_new_tokens=8))) == 6


def test_defaults_come_from_the_artifact_and_options_override(make):
    with load(make([TOP_K, CENTIGRADE, MAX_NEW, SEED])) as model:
        prompt = [1, 2, 3, 4]
        assert list(model.generate_tokens(prompt, seed=98, max_new_tokens=4)) == [33, 50, 4, 1]
        got = list(model.generate_tokens(prompt, top_k=7, temperature=0, seed=5, max_new_tokens=4))
        assert got == [7, 0, 4, 5]
        assert next(model.generate_tokens(prompt, temperature=1.25, stop_tokens=[33])) == 33
        fits = CONTEXT - len(prompt) + 1
        assert list(model.generate_tokens(prompt, stop_tokens=[fits])) == [33, 50, fits]
        seeds = {model.generate_tokens(prompt)._job.request.seed for _ in range(4)}
        assert len(seeds) == 4


def test_without_a_tokenizer_ids_work(make):
    with load(make([5, 6, 7], files={})) as model:
        assert not model.has_text
        assert list(model.generate_tokens([1], max_new_tokens=3)) == [5, 6, 7]
        for prompt in ("Hi", [1]):
            with pytest.raises(UserError, match="no tokenizer.json"):
                model.generate(prompt)


# --- conversation ------------------------------------------------------------------------------------------------


def test_chat_runs_only_what_the_cache_lacks(make):
    with load(make([*ids("Yes"), END])) as model:
        history = [{"role": "user", "content": "One?"}]
        generation = model.chat(history)
        assert "".join(generation) == "Yes"
        first = ids("<user>One?<end>")
        assert (generation.result.num_prompt_tokens, generation.result.num_cached_tokens) == (len(first), 0)
        history += [{"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Two?"}]
        generation = model.chat(history)
        assert "".join(generation) == "Yes"
        # The end token was chosen but is not in the cache, so it is run.
        assert generation.result.num_cached_tokens == len(first) + 3
        assert generation.result.num_prompt_tokens == len(ids("<end><user>Two?<end>"))
        assert model.length == len(ids("<user>One?<end>Yes<end><user>Two?<end>")) + 3


def test_chat_again_runs_one_token_and_a_changed_one_runs_the_rest(make):
    with load(make([*ids("Yes"), END])) as model:
        for question, cached in (("One?", 0), ("One?", 5), ("Other", 2)):
            generation = model.chat([{"role": "user", "content": question}])
            list(generation)
            assert generation.result.num_cached_tokens == cached
        model.reset()
        generation = model.chat([{"role": "user", "content": "Other"}])
        list(generation)
        assert generation.result.num_cached_tokens == 0


# --- ending early ------------------------------------------------------------------------------------------------


def native_threads() -> int:
    return sum(t.name == "mkpack-generate" for t in threading.enumerate())


def test_closing_the_iterator_cancels_and_the_model_goes_on(make):
    with load(make([*ids("abc"), WAIT])) as model:
        generation = model.generate("Hi")
        assert next(generation) == "a"
        with pytest.raises(UserError, match="still generating"):
            model.step([1])
        with pytest.raises(UserError, match="still generating"):
            list(model.generate("again"))
        generation.close()
        assert generation.result.stop_reason == "cancelled"
        assert native_threads() == 0
        assert list(generation) == []
        # What was chosen before the cancel, but for the last, is what the cache holds.
        assert model._cached == [*ids("<user>Hi<end>"), *generation.result.tokens[:-1]]
        assert model.length == len(model._cached)
        assert "".join(model.generate("Hi", max_new_tokens=3)) == "abc"


def test_a_dropped_iterator_cancels(make):
    with load(make([*ids("abc"), WAIT])) as model:
        for piece in model.generate("Hi"):
            assert piece == "a"
            break
        gc.collect()
        assert native_threads() == 0
        with model.generate("Hi") as generation:
            next(generation)
        assert native_threads() == 0


def test_a_generation_closed_before_it_began_is_cancelled(make):
    with load(make(HELLO)) as model:
        generation = model.generate("Hi")
        generation.close()
        assert (generation.result.stop_reason, generation.result.tokens) == ("cancelled", ())
        assert model.length == 0


def test_ctrl_c_cancels_a_kernel_that_gives_no_token(make):
    with load(make([*ids("a"), WAIT])) as model:
        generation, pieces = model.generate("Hi"), []
        main = threading.main_thread().ident

        def interrupt() -> None:
            until(lambda: pieces and sys._current_frames()[main].f_code is Run.__iter__.__code__)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            for piece in generation:
                pieces.append(piece)
        thread.join()
        assert pieces == ["a"]
        assert generation.result.stop_reason == "cancelled"
        assert native_threads() == 0
        assert len(model.step([1])) == 1


def test_closing_the_model_ends_a_running_generation(make):
    model = load(make([*ids("a"), WAIT]))
    generation = model.generate("Hi")
    assert next(generation) == "a"
    model.close()
    assert list(generation) == []
    assert generation.result.stop_reason == "cancelled"


def test_leaving_the_program_in_the_middle_is_clean(make):
    code = f"import mkpack; m = mkpack.load({str(make([*ids('a'), WAIT]))!r}); g = m.generate('Hi'); print(next(g))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_failing_kernel_is_an_internal_error_and_the_model_goes_on(make):
    with load(make([*ids("ab"), FAIL])) as model:
        generation, pieces = model.generate("Hi"), []
        with pytest.raises(InternalError, match="timed out: worker 3 did not arrive"):
            pieces.extend(generation)
        generation.close()
        assert pieces == ["a", "b"] and generation.result is None
        assert "".join(model.generate("Hi", max_new_tokens=2)) == "ab"
    with pytest.raises(UserError, match="out of memory: no memory for the cache"):
        load(make(HELLO), wait_limit=77)


def test_bad_requests_are_refused_before_anything_runs(make):
    with load(make(HELLO)) as model:
        for prompt, match in (
            ("", "prompt is empty"),
            ([], "prompt is empty"),
            (7, "prompt is empty"),
            ([1, VOCAB, -1], f"the prompt: 2 ids outside 0 to {VOCAB - 1}, the first {VOCAB} at 1"),
            ([1, 2.5], "expected token ids"),
            ([1] * 65, "65 tokens and the context holds 64"),
            ("x" * 100, "102 tokens and the context holds 64"),
        ):
            with pytest.raises(UserError, match=match):
                model.generate(prompt)
        with pytest.raises(UserError, match="bad sampling values: 5 problems") as caught:
            model.generate("Hi", temperature=-1, top_p=2, top_k=-1, max_new_tokens=0, seed=-1)
        for name in ("temperature", "top_p", "top_k", "max_new_tokens", "seed"):
            assert f"- {name} is " in str(caught.value)
        with pytest.raises(UserError, match="stop_tokens: 1 ids outside"):
            model.generate("Hi", stop_tokens=[VOCAB])
        with pytest.raises(TypeError, match="top_q"):
            model.generate("Hi", top_q=1)  # type: ignore[call-arg]
        assert model.length == 0


def test_step_gives_the_last_logits_over_any_number_of_tokens(make):
    with load(make(HELLO)) as model:
        logits = model.step([7])
        assert logits.dtype == np.float32 and logits.shape == (1, VOCAB)
        assert logits[0, 0] == 7000
        tokens = list(range(10, 23))
        for wanted in range(len(tokens) + 1):
            model.truncate(1)
            logits = model.step(tokens, num_logits=wanted)
            expected = [[t * 1000 + 1 + i + v / 1024 for v in range(VOCAB)] for i, t in enumerate(tokens)]
            assert np.array_equal(logits, np.array(expected[len(tokens) - wanted :], np.float32).reshape(wanted, VOCAB))
            assert model.length == 14
        for tokens, wanted, match in (
            ([], 1, "at least one"),
            ([1], 2, "num_logits is 2"),
            ([VOCAB], 1, "outside"),
            ([1] * 51, 1, "the context is 64, 14 positions are taken"),
        ):
            with pytest.raises(UserError, match=match):
                model.step(tokens, wanted)
        for layers, match in (
            ([], "layers is empty"),
            ([0, -1, 99], f"layers: expected 0 to {len(SPEC.layers) - 1}, found -1, 99"),
            ([0], "tells no hidden states"),  # a kernel from before they existed
        ):
            with pytest.raises(UserError, match=match):
                model.step_taps([1], layers)
        with pytest.raises(UserError, match="truncate the cache to 15"):
            model.truncate(15)
        model.reset()
        assert model.length == 0


def test_chat_after_steps_reuses_what_they_ran(make):
    with load(make(HELLO)) as model:
        model.step(ids("<user>On"))
        generation = model.chat([{"role": "user", "content": "One?"}])
        list(generation)
        assert generation.result.num_cached_tokens == 3
