"""How does stock assisted decoding, at batch 1, draw its candidates from one of our chains?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator, LogitsProcessorList

from ..engines.modules.attention import ragged_attention_on
from ..speculation.sampling import drawn_seed
from .config import SpeculationConfig
from .levels.resolve import resolve
from .levels.wiring import Wiring
from .processing import Prompts
from .request import check_request, check_target

_ROWS_ALONE = "transformers' own loop checks candidates that are a row"


class ChainCandidateGenerator(CandidateGenerator):
    """The levels below a target as a transformers `CandidateGenerator`, for stock assisted decoding at batch 1.

    model: the target. levels, assistant_tokenizers, speculation_config, tokenizer: as in
        `model.generate(assistant_models=...)`.
    generation_config, logits_processor: those of the call; do_sample selects greedy or sampled drafts.

    Candidates are point masses, without logits, sampled ones as well: stock decoding draws its own token at each place
    and compares, which is exact. Levels draft with the noise of one seed, drawn when the generator is made.

    Stock decoding does not share the target's cache, so every level has its own. It gets its generator from
    `model._get_candidate_generator`; set that on the instance to return this object. `assistant_model` may then be any
    model. Raises ValueError without levels.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        levels: list,
        *,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        assistant_tokenizers: list | None = None,
        speculation_config: SpeculationConfig | dict | None = None,
        tokenizer=None,
    ):
        settings = generation_config or model.generation_config
        config = replace(SpeculationConfig.of(speculation_config), shared_cache=False)
        if not levels:
            raise ValueError("ChainCandidateGenerator needs at least one level to draw candidates from")
        if config.tree is not None and len(levels) == 1:  # a level in the middle hands up a row
            raise ValueError(f"tree is {config.tree}, and {_ROWS_ALONE}: leave tree out")
        check_target(model, settings.num_beams)
        check_request(None, settings, {})
        self.max_length = settings.max_length
        self._prompts, self._settled = None, []
        seed = drawn_seed() if settings.do_sample else None
        found = resolve(model, levels, assistant_tokenizers, config)

        def build(prompts: Prompts):
            wiring = Wiring(
                model,
                tokenizer,
                config,
                seed=seed,
                prompts=prompts,
                processors=logits_processor or LogitsProcessorList(),
                capacity=0,
            )
            return wiring.build(found)

        self._build = build

    @property
    def stats(self) -> list:
        """What each level drafted so far, from the level below the target down."""
        return [level.stats for level in self._chain.levels] if self._prompts else []

    def get_candidates(self, input_ids: Tensor, **kwargs) -> tuple[Tensor, None]:
        """input_ids int64 `[1, n]` -> candidates `[1, n + k]`, and None in place of their logits."""
        row = input_ids[0].tolist()
        if self._prompts is None or row[: len(self._settled)] != self._settled:  # another text: a new call of generate
            self._prompts = Prompts(input_ids, None)
            self._chain = self._build(self._prompts)
            self._chain.drafter.start(1, input_ids.device)
        self._settled = row
        room = len(row) + self._chain.num_draft_tokens if self.max_length is None else self.max_length - 1
        limit = max(min(self._chain.num_draft_tokens, room - len(row)), 0)
        runners = [runner for runner in self._chain.runners if runner is not None and runner.can.by_module]
        with ragged_attention_on([runner.model for runner in runners]), torch.inference_mode():
            draft = self._chain.drafter.propose([row], [limit])
        if draft.branches:
            raise ValueError(f"level {self._chain.drafter.name} proposes a tree, and {_ROWS_ALONE}: let it draft rows")
        self._drafted = draft.lengths[0]
        return torch.cat([input_ids, draft.tokens[:, : self._drafted].to(input_ids)], dim=1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Stock decoding committed `num_matches` candidates and one more token; input_ids int64 `[1, n]` holds them
        all.
        """
        matches = min(int(num_matches), self._drafted)
        self._chain.drafter.stats.settle([self._drafted], [matches])
        self._chain.drafter.rollback([input_ids.shape[1] - 1])
        self._settled = input_ids[0].tolist()
