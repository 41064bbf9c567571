"""How does lm-eval ask a model with levels? MLSpecLM: generation through the chain, scores through the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import fsum
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import has_bos_prefix, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "lm_eval":
        raise
    missing = 'lm_eval is not installed: pip install --no-build-isolation -e ".[eval]" in the folder of hf_mlspec'
    raise ModuleNotFoundError(missing, name="lm_eval") from error

from .. import SpeculationStats
from ..integration.request import max_positions
from ..integration.scoring import TokenScores, score_rows
from .harness_arguments import Arguments
from .harness_generation import Writer
from .harness_ranks import Ranks, journals
from .harness_requests import Finished, Generation, fit_rows, generation_keys, request_key
from .harness_system import describe, identity, load_model, load_tokenizer
from .journal import Journal

MODEL_NAME = "mlspec"  # what lm-eval's --model calls it, once this module is imported


@register_model(MODEL_NAME)
class MLSpecLM(TemplateLM):
    """A causal language model for lm-eval, with levels below it: `lm_eval.simple_evaluate(model=MLSpecLM(...), ...)`.

    pretrained: folder or hub name, or a live model (then dtype, device and format do not apply). tokenizer: folder,
        hub name or tokenizer; None: the model's own. levels: "mxfp4+PATH", or a list of what `assistant_models` takes;
        None: the target alone.
    format, group_size: pack the model to "int4", "mxfp4", "nested-bf16" or "bitplanes" while it loads. precision: what
        the target itself reads of such weights, and multiplies them by: "w4a16", "w4a8", "w4a4", "mxfp4", "mxfp4a8",
        "nested", "nested4", "nested4a8", or "planes1" up to all its planes, at most "planes8"; None: as it is stored.
    num_draft_tokens, confidence_threshold: one number, or one per level, a list or "12+5". The other options of
        SpeculationConfig go by their names, or all of them as speculation=SpeculationConfig(...).
    dtype: "bfloat16", "float32", "float16" or "auto". device: None: "cuda" where there is one, else "cpu".
    batch_size: rows decoded or scored at a time; where lm-eval says "auto", max_batch_size or 8.
    max_length: tokens of prompt and answer, None: the model's positions. max_gen_toks: where a task does not say.
    add_bos_token, prefix_token_id, chat_template_args, enable_thinking, think_end_token, revision, trust_remote_code:
        as lm-eval's model "hf" has them.
    seed: of sampled requests that name none. journal: a file of finished requests: a run that was killed goes on where
        it was, and answers of another system are refused. Of several processes (`accelerate launch`, torchrun) each
        answers its share of the documents and has a journal of its own beside it, FILE.rank1 and so on.

    generations: by `request_key("generate_until", request.args)`: {"prompt_tokens": number, "ids": new ones, "text"}.
    speculation: the counts of all generation of this object. Raises TypeError or ValueError, naming the argument and
    the remedy, before anything is asked.
    """

    def __init__(self, pretrained: str | PreTrainedModel | None = None, tokenizer: Any = None, **arguments: Any):
        super().__init__()
        given = arguments | {"pretrained": pretrained, "tokenizer": tokenizer}
        self.arguments = asked = Arguments.of({name: value for name, value in given.items() if value is not None})
        self._ranks = Ranks()
        self._rank, self._world_size = self._ranks.rank, self._ranks.size
        asked.device = self._ranks.device(asked.device)
        self.tokenizer = load_tokenizer(asked)
        self.model = load_model(asked)
        self.max_length = self._fitting(asked.max_length)
        self.generations: dict[str, dict[str, Any]] = {}
        self._finished = Finished(None)
        self._places: dict[tuple[str, str], str] = {}  # of what is scored now: the task and its document
        # Levels that cannot serve this target are refused here, not after an hour of other requests.
        self._writer = Writer(self.model, self.tokenizer, asked, self.max_length)
        self._identity = None if asked.journal is None else identity(self.model, self.tokenizer, asked)
        self._journal().close()

    def _fitting(self, length: int | None) -> int:
        most = max_positions(self.model)
        if length is not None and most is not None and length > most:
            raise ValueError(f"max_length is {length}, and the model has {most} positions: give {most} or less")
        named = getattr(self.tokenizer, "model_max_length", None)
        return length or most or (named if named and named < 2**31 else 2048)

    @property
    def batch_size(self) -> int:
        """Rows decoded or scored at a time."""
        return self.arguments.batch_size

    @property
    def device(self):
        return self.model.device

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task does not say."""
        return self.arguments.max_gen_toks

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it. ValueError where the tokenizer knows no such token."""
        choices = (self.arguments.prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        found = next((token for token in choices if token is not None), None)
        if found is None:
            raise ValueError("the tokenizer has neither a bos nor an eos token to score a first token after: pass "
                             "prefix_token_id")
        return found

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of prompts."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; special tokens as asked, as add_bos_token says, or as the tokenizer does by itself, but no second
        bos before a text that begins with one."""
        special = self.arguments.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.bos_token):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the tokenizer's chat template writes it; without one, transformers says so."""
        options, thinking = dict(self.arguments.chat_template_args or {}), self.arguments.enable_thinking
        if thinking is not None:
            options["enable_thinking"] = thinking
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt, **options,
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding writes it) of every request, in order."""
        keys = [request_key("loglikelihood", request.args) for request in requests]
        with self._going_on() as finished:
            missing = {key: one for key, one in zip(keys, requests, strict=True) if key not in finished}
            for one in missing.values():
                if not one.args[1]:
                    raise ValueError(f"task {one.task_name}, document {one.doc_id}: the continuation is empty, and a "
                                     "score needs a token")
            self._places = {one.args: f"task {one.task_name}, document {one.doc_id}" for one in missing.values()}
            super().loglikelihood(list(missing.values()), disable_tqdm=disable_tqdm)
            return [tuple(finished[key]) for key in keys]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """requests: (context and continuation, token ids of each); every one is finished as soon as it is scored."""
        counts = [len(continuation) for *_, continuation in requests]
        if 0 in counts:
            self._refuse_merged(requests[counts.index(0)][0])
        rows = fit_rows([context + scored for _, context, scored in requests], counts, self.max_length)
        found: dict[int, tuple[float, bool]] = {}
        for index, scores in self._scored(rows, counts, "loglikelihood", disable_tqdm):
            found[index] = scores.total, bool(scores.greedy.all())
            if (arguments := requests[index][0]) is not None:
                self._finish("loglikelihood", arguments, found[index])
        return [found[index] for index in range(len(requests))]

    def _refuse_merged(self, arguments: tuple[str, str] | None) -> None:
        """lm-eval cuts the tokens of both texts behind those of the context; where the tokenizer writes the end of the
        context and the continuation as one token, nothing is left to score."""
        context, continuation = arguments or ("", "")
        place = self._places.get(arguments, "a request")
        raise ValueError(f"{place}: the continuation {continuation!r} has no token of its own behind the context, "
                         f"which ends with {context[-20:]!r}: the tokenizer merges them; begin the continuation with "
                         "a space, or end the context before the word (target_delimiter)")

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of every whole text, in windows of `max_length` tokens that lm-eval cuts."""
        keys = [request_key("loglikelihood_rolling", request.args) for request in requests]
        with self._going_on() as finished:
            texts = {key: one.args for key, one in zip(keys, requests, strict=True) if key not in finished}
            windows = [(args, *window) for args in texts.values() for window in self._windows(args[0])]
            left = Counter(args for args, *_ in windows)
            totals: dict[Any, list[float]] = {args: [] for args in texts.values()}
            for args in set(totals) - set(left):  # a text of no tokens
                self._finish("loglikelihood_rolling", args, 0.0)
            rows, counts = [context + scored for _, context, scored in windows], [len(one[2]) for one in windows]
            for index, scores in self._scored(rows, counts, "loglikelihood_rolling", disable_tqdm):
                args = windows[index][0]
                totals[args].append(scores.total)
                if len(totals[args]) == left[args]:
                    self._finish("loglikelihood_rolling", args, fsum(totals[args]))
            return [finished[key] for key in keys]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """(context, scored tokens) of every window; each token is scored once."""
        tokens = self.tok_encode(text)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def _scored(
        self, rows: list[list[int]], counts: list[int], title: str, quiet: bool
    ) -> Iterator[tuple[int, TokenScores]]:
        asked = self.arguments
        scores = score_rows(self.model, rows, num_scored=counts, precision=asked.precision,
                            batch_size=asked.batch_size, prepare=asked.speculation.prepare)
        return iter(tqdm(scores, desc=f"{title} requests", total=len(rows), disable=quiet))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after every context, up to the first of its stops, in the order of the requests."""
        keys = generation_keys([request.args for request in requests])
        with self._going_on() as finished:
            missing = {key: one.args for key, one in zip(keys, requests, strict=True) if key not in finished}
            prompts = self._writer.fit({key: self._prompt(*args) for key, args in missing.items()})
            with tqdm(total=len(prompts), desc="generate_until requests", disable=disable_tqdm) as bar:
                for done in self._writer.write(prompts):
                    ids, how = prompts[done.id]
                    text = postprocess_generated_text(done.text, how.until, self.arguments.think_end_token)
                    finished.add(done.id, {"prompt_tokens": len(ids), "ids": done.new_tokens, "text": text})
                    self.cache_hook.add_partial("generate_until", missing[done.id], text)
                    bar.update()
            self.generations |= {key: finished[key] for key in keys}
        return [self.generations[key]["text"] for key in keys]

    def _prompt(self, context: str, gen_kwargs: dict[str, Any]) -> tuple[list[int], Generation]:
        return self.tok_encode(context) or [self.prefix_token_id], Generation.of(gen_kwargs, self.max_gen_toks)

    @property
    def speculation(self) -> SpeculationStats:
        """Counts and seconds of everything this object generated; what came from a journal is not among it."""
        return self._writer.speculation

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        return describe(self.model, self.arguments) | {"speculation": self.speculation.to_dict()}

    @contextmanager
    def _going_on(self) -> Iterator[Finished]:
        """What is finished already, and where the rest is put as it is; the journal is let go at the end."""
        with self._journal() as self._finished:
            yield self._finished

    def _journal(self) -> Finished:
        file = self.arguments.journal
        if file is None:
            return Finished(None)
        journal = Journal(self._ranks.journal(Path(file)), self._identity)
        try:
            for other in journals(Path(file)):
                if other != journal.path:
                    journal.borrow(other)
        except BaseException:
            journal.close()
            raise
        return Finished(journal)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As if all processes had as many requests as this one: lm-eval asks so as to add empty ones where there are
        fewer, for models that step together; ours do not."""
        return tensor.reshape(1).repeat(self.world_size)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """What every process measured, on rank `dst`, in the order of the documents; None on the others."""
        return self._ranks.gathered(obj, dst)

    def barrier(self) -> None:
        """Wait for all processes."""
        self._ranks.barrier()

    def _finish(self, kind: str, arguments: tuple, answer: Any) -> None:
        self._finished.add(request_key(kind, arguments), answer)
        self.cache_hook.add_partial(kind, arguments, answer)
