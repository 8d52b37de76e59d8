"""A loaded artifact: prompts, tokens and steps -> calls of its kernel, with what the cache holds in mind."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from mkpack.artifact import Artifact
from mkpack.digest import Verification
from mkpack.errors import UserError
from mkpack.generation import STOP_REASONS, GenerateOptions, Generation, Job, Result, make_request
from mkpack.manifest import Manifest
from mkpack.native import NativeModel, RankTiming, Run
from mkpack.spec import ModelSpec
from mkpack.text import Decoder, Sampling, Text

if TYPE_CHECKING:
    import numpy as np

    from mkpack.launcher import Group
    from mkpack.rebuild import Rebuilt

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class Digests:
    """The digest check of the weights: begun at once, waited for when the first token is wanted."""

    def __init__(self, artifact: Artifact, names: list[str], drop: bool) -> None:
        """drop: the memory that reading them took is given back when they are checked."""
        self._artifact, self._dropped = artifact, names if drop else []
        self._begin = functools.partial(artifact.verify_async, names)
        self._running: Verification | None = self._begin()

    def wait(self) -> None:
        """UserError listing every damaged entry, now and whenever it is called again."""
        if self._running is None:
            return
        try:
            self._running.result()
        except KeyboardInterrupt:
            self._running = self._begin()  # an interrupted check can only say that it was
            raise
        self._running = None
        for name in self._dropped:
            self._artifact.drop(name)


class Model:
    """A loaded artifact: one request at a time. A context manager; close() frees it at once.

    Every method raises UserError for what the caller can mend and InternalError when the kernel fails; the model can be
    used after either. The first use waits for the digests of the weights and raises UserError when one is wrong.
    """

    def __init__(
        self,
        artifact: Artifact,
        native: NativeModel,
        target: str,
        context: int,
        files: dict[str, bytes],
        digests: Digests | None,
        group: Group | None = None,
    ) -> None:
        self.manifest: Manifest = artifact.manifest
        self.target = target
        self.context = context
        self._native = native
        self._files = files
        self._text: Text | None = None
        self._digests = digests
        self._group = group  # the processes that have its other ranks
        self.rebuilt: Rebuilt | None = None  # the kernel, when it was compiled here for this load
        # Ids in the KV cache, by position; fewer than there are when a run was left before they were known.
        self._cached: list[int] = []
        self._finalizer = weakref.finalize(self, _close, native, artifact)

    def close(self) -> None:
        """Cancels what runs and frees everything. Idempotent."""
        self._finalizer()
        self._digests = None  # its views would keep the artifact mapped

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def follows(self) -> bool:
        """Whether this process has ranks but not rank 0 (`world` of load()): follow() is all that it can do then."""
        return self._group is not None and self._group.follows

    def follow(self) -> None:
        """Does what is asked of the model in rank 0's process, until that one closes it.

        InternalError when rank 0's process ends otherwise, or a kernel fails.
        """
        if self._group is None or not self._group.follows:
            raise UserError("this process has rank 0, which follows nobody")
        self._group.follow(self._native.repeat)

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.spec

    @property
    def has_text(self) -> bool:
        """Whether the artifact has a tokenizer; without one the model takes and gives token ids only."""
        return "tokenizer.json" in self._files

    @property
    def text(self) -> Text:
        """The tokenizer side. UserError when the artifact has no tokenizer."""
        self.require_text()
        assert self._text
        return self._text

    def require_text(self) -> None:
        """UserError when the artifact has no tokenizer."""
        if self._text is None:
            self._text = self._make_text()

    def _make_text(self) -> Text:
        if self.manifest.source.kind == "dummy" and not self.has_text:
            raise UserError(
                "no tokenizer: this artifact holds random weights (source.dummy of its recipe), so it takes and gives "
                "token ids only; mkpack bench measures its speed"
            )
        return Text(self._files)

    @property
    def length(self) -> int:
        """Positions in the KV cache."""
        return self._native.length()

    def truncate(self, length: int) -> None:
        """Forgets every position from `length` on."""
        held = self.length
        if not 0 <= length <= held:
            raise UserError(f"cannot truncate the cache to {length} positions: expected 0 to {held}, what it holds")
        self._native.truncate(length)
        del self._cached[length:]

    def reset(self) -> None:
        """Forgets every position."""
        self.truncate(0)

    def read_bandwidth(self) -> float:
        """Bytes per second that the model's threads read from its weights: what speeds are held against."""
        return self._native.read_bandwidth()

    def time_step(self, tokens: Sequence[int]) -> tuple[float, float]:
        """Seconds that the device takes for one step of these tokens with logits of all of them, after what the cache
        holds and without keeping them; and how many distinct experts they chose, the mean of the layers.

        tokens: at most limits.tokens_per_step. UserError when the kernel times no step; those for CPUs do not.
        """
        return self._native.time_step(self._one_step(tokens))

    def time_rank(self, tokens: Sequence[int]) -> RankTiming:
        """time_step() of a rank that was loaded alone (`rank_of` of load()), with its exchanges and without."""
        return self._native.time_rank(self._one_step(tokens))

    def trace(self, tokens: Sequence[int], steps: int) -> tuple[list[str], np.ndarray]:
        """When the device did what, in `steps` steps after what the cache holds, which are not kept: of one token and
        those chosen after it, or of the same several tokens each.

        Returns the names of the rows ("consumers qkv") and int64 [steps, layers + 1, rows, SMs, 4] nanoseconds, as
        mk_trace of csrc/abi.h gives them. UserError when the kernel was built without --trace.
        """
        return self._native.trace(self._one_step(tokens), steps)

    def _one_step(self, tokens: Sequence[int]) -> list[int]:
        ids, most = self._token_ids(tokens, "tokens"), self.manifest.limits.tokens_per_step
        if len(ids) > most:
            raise UserError(f"a step of {len(ids)} tokens: this artifact was built for at most {most}")
        if self._digests:
            self._digests.wait()
        return ids

    def bytes_per_step(self, tokens: int = 1, position: int = 0, experts: float | None = None) -> float:
        """Bytes that a step must read on what the model runs on: weights once (of experts `experts` a layer, or those
        that `tokens` tokens are expected to choose), and the keys and values of `position` earlier tokens. On a CPU
        those of all ranks, on GPUs those of each."""
        from mkpack import schedule

        layout = self.manifest.kernels[self.target].layout
        found = schedule.phases_of(self.manifest, layout)
        kv = schedule.kv_element(self.spec, layout, self.manifest.tp)
        return schedule.step_bytes(self.spec, found, tokens, position, kv, experts)

    def step(self, tokens: Sequence[int], num_logits: int = 1) -> np.ndarray:
        """Runs tokens after what the cache holds; any number that fits the context.

        Returns the logits of the last num_logits tokens: float32 [num_logits, vocab_size].
        """
        return self._step(tokens, num_logits, ())[0]

    def step_taps(
        self, tokens: Sequence[int], layers: Sequence[int], num_logits: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """step(), and hidden states, which a drafter reads.

        Returns the logits, and float32 [len(layers), len(tokens), hidden_size]: the residual after each of `layers`
        (from 0 on), after the last layer before the final norm.
        """
        if not layers:
            raise UserError("layers is empty: expected the numbers of the layers whose hidden states are wanted")
        return self._step(tokens, num_logits, layers)

    def _step(self, tokens: Sequence[int], num_logits: int, layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        ids, last = self._token_ids(tokens, "tokens"), len(self.spec.layers) - 1
        if bad := [layer for layer in layers if not 0 <= layer <= last]:
            raise UserError(f"layers: expected 0 to {last}, found {', '.join(map(str, bad))}")
        if not 0 <= num_logits <= len(ids):
            raise UserError(f"num_logits is {num_logits}; expected 0 to {len(ids)}, the number of tokens")
        if self._digests:
            self._digests.wait()
        held = self.length
        if held + len(ids) > self.context:
            raise UserError(f"{len(ids)} tokens do not fit: the context is {self.context}, {held} positions are taken")
        logits = np.empty((num_logits, self.spec.vocab_size), np.float32)
        hidden = np.empty((len(layers), len(ids), self.spec.hidden_size), np.float32)
        first, most = len(ids) - num_logits, self.manifest.limits.tokens_per_step
        known, self._cached = self._cached, []
        for start in range(0, len(ids), most):
            part = ids[start : start + most]
            rows = slice(max(0, start - first), max(0, start + len(part) - first))
            if layers:
                taken = np.empty((len(layers), len(part), self.spec.hidden_size), np.float32)
                self._native.step_taps(part, logits[rows], layers, taken)
                hidden[:, start : start + len(part)] = taken
            else:
                self._native.step(part, logits[rows])
        if len(known) == held:
            self._cached = known + ids
        return logits, hidden

    def generate(self, prompt: Prompt, *, raw: bool = False, **options: Unpack[GenerateOptions]) -> Generation[str]:
        """Answers one prompt from an empty cache; iterate over the pieces of text as they come.

        prompt: a text, put into the chat template unless `raw`; messages [{"role": ..., "content": ...}, ...]; or token
        ids, which are run as they are.
        """
        job = self._job(self._encode(prompt, raw), False, **options)
        continues = raw if isinstance(prompt, str) else not isinstance(prompt[0], Mapping)
        return Generation(job, self._pieces(job, self.text.stream(continues=continues)))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[GenerateOptions]) -> Generation[str]:
        """generate() for a conversation that grows: what the cache already holds of it is not run again."""
        job = self._job(self.text.encode_chat(messages), True, **options)
        return Generation(job, self._pieces(job, self.text.stream()))

    def generate_tokens(
        self, prompt: Prompt, *, raw: bool = False, reuse: bool = False, **options: Unpack[GenerateOptions]
    ) -> Generation[int]:
        """generate(), in token ids; a stop token that ends it is the last. reuse: what the cache already holds of the
        prompt is not run again."""
        job = self._job(self._encode(prompt, raw), reuse, **options)
        return Generation(job, self._tokens(job))

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        if not isinstance(prompt, str | Sequence) or len(prompt) == 0:
            raise UserError("the prompt is empty; expected a text, a list of messages or a list of token ids")
        if isinstance(prompt, str):
            return self.text.encode_raw(prompt) if raw else self.text.encode_chat([{"role": "user", "content": prompt}])
        if isinstance(prompt[0], Mapping):
            return self.text.encode_chat(prompt)  # type: ignore[arg-type]
        return list(prompt)  # type: ignore[arg-type]

    def _token_ids(self, tokens: Iterable[Any], what: str) -> list[int]:
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError as error:
            raise UserError(f"{what}: expected token ids, found {error}") from error
        if not ids:
            raise UserError(f"{what}: empty; expected at least one token id")
        bad = [i for i, token in enumerate(ids) if not 0 <= token < self.spec.vocab_size]
        if bad:
            raise UserError(
                f"{what}: {len(bad)} ids outside 0 to {self.spec.vocab_size - 1}, the first {ids[bad[0]]} at {bad[0]}"
            )
        return ids

    def _more(self) -> str:
        """How to get a larger context."""
        limit = self.manifest.limits.context
        if self.context < limit:
            return f"ask for a context of up to {limit} (--context)"
        return "build the artifact with a larger limits.context"

    def _job(
        self,
        prompt: Sequence[int],
        reuse: bool,
        *,
        max_new_tokens: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Job:
        ids = self._token_ids(prompt, "the prompt")
        if len(ids) > self.context:
            raise UserError(
                f"the prompt has {len(ids)} tokens and the context holds {self.context}; shorten it, or {self._more()}"
            )
        text = self.text if self.has_text else None
        stops = stop_tokens if stop_tokens is not None else text.stop_tokens if text else ()
        stops = self._token_ids(stops, "stop_tokens") if stops else []
        request = make_request(
            text.defaults if text else Sampling(),
            stops,
            max_new_tokens=max_new_tokens,
            room=self.context - len(ids) + 1,  # the last token chosen is not in the cache
            **sampling,
        )
        return Job(ids, reuse, request, frozenset(stops))

    def _pieces(self, job: Job, decoder: Decoder) -> Generator[str, None, None]:
        with contextlib.closing(self._tokens(job)) as tokens:
            for token in tokens:
                if token not in job.stop_tokens and (piece := decoder.push(token)):
                    yield piece
        if rest := decoder.finish():
            yield rest

    def _tokens(self, job: Job) -> Generator[int, None, None]:
        if self._digests:
            self._digests.wait()
        keep = _common(self._cached, job.prompt[:-1]) if job.reuse else 0
        self.truncate(keep)
        self._cached = []
        run = self._native.generate(job.prompt[keep:], job.request)
        try:
            yield from run
        finally:
            run.stop()
            self._finish(job, run, keep)
        if run.error is not None:
            raise run.error

    def _finish(self, job: Job, run: Run, keep: int) -> None:
        with contextlib.suppress(UserError):  # closed meanwhile
            self._cached = [*job.prompt, *run.tokens][: self.length]
        if run.error is None:
            job.result = Result(
                stop_reason=STOP_REASONS[run.result.stop_reason],
                tokens=tuple(run.tokens),
                num_prompt_tokens=len(job.prompt) - keep,
                num_cached_tokens=keep,
                prefill_s=run.result.prefill_s,
                decode_s=run.result.decode_s,
                seed=job.request.seed,
            )


def _close(native: NativeModel, artifact: Artifact) -> None:
    native.close()
    artifact.close()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
