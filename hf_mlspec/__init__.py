"""Multi-level speculative decoding for transformers: `model.generate(**inputs, assistant_models=["mxfp4", draft])`.

Importing registers the "mlspec" quantizer and lets `generate` take `assistant_models`; it touches no device.
"""

from .demo_pair import demo_pair
from .engines.prepare import prepare, restore
from .integration.call import generate, last_stats
from .integration.candidates import ChainCandidateGenerator
from .integration.compare import Comparison, compare
from .integration.config import SpeculationConfig
from .integration.hook import disable, enable, enabled
from .integration.levels.resolve import clear
from .integration.load import load
from .integration.quantizer.calibrated import Calibrated, quantize
from .integration.quantizer.ends import pack_head_and_embedding
from .integration.quantizer.learned_rotation import learn_rotation
from .integration.quantizer.quantizer import MLSpecConfig
from .integration.routed import route
from .integration.stream.events import NewTokens, TokenLogprob
from .integration.stream.request import Completion, Request
from .integration.stream.shown import show_levels
from .integration.stream.stream import generate_stream
from .integration.streamed import stream_planes
from .nn.fewer_experts import fewer_experts
from .nn.nest import nest, unnest
from .nn.replace import direct_cast, early_exit, resident_bytes
from .nn.switch import precision_switch
from .routing.training import RouterRecipe, Trained, train_router
from .speculation.draft import Draft, Drafter
from .speculation.drafters.lookup_tree import LookupTree
from .speculation.drafters.ngram import NGram
from .speculation.drafters.prompt_lookup import PromptLookup
from .speculation.stats import LevelStats, PlanStats, SpeculationStats

__version__ = "0.1.0"

__all__ = [
    "Calibrated",
    "ChainCandidateGenerator",
    "Comparison",
    "Completion",
    "Draft",
    "Drafter",
    "LevelStats",
    "LookupTree",
    "MLSpecConfig",
    "NGram",
    "NewTokens",
    "PlanStats",
    "PromptLookup",
    "Request",
    "RouterRecipe",
    "SpeculationConfig",
    "SpeculationStats",
    "TokenLogprob",
    "Trained",
    "clear",
    "compare",
    "demo_pair",
    "direct_cast",
    "disable",
    "early_exit",
    "enable",
    "enabled",
    "fewer_experts",
    "generate",
    "generate_stream",
    "last_stats",
    "learn_rotation",
    "load",
    "nest",
    "pack_head_and_embedding",
    "precision_switch",
    "prepare",
    "quantize",
    "resident_bytes",
    "restore",
    "route",
    "show_levels",
    "stream_planes",
    "train_router",
    "unnest",
]

enable()
