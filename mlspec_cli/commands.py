"""Which commands are there, and which words does each take? What they do is in hf_mlspec/cli, a file a command.

What a record of the package decides (formats, level words, dtypes) is any word here, and is looked at when the command
runs: asking the records would import torch.
"""

from __future__ import annotations

import argparse
from typing import Any

from .options import add_chain, add_drafting, add_json, add_levels, add_place
from .parser import Parser
from .values import clip, gap, interval, model, numbers, port, positive, positives, seconds, seed, size, text


def add_commands(top: Parser) -> list[str]:
    """Every command, in the order of the help; -> their names."""
    commands = top.add_subparsers(dest="command")
    for add in (_add_demo, _add_quantize, _add_convert, _add_inspect, _add_verify, _add_generate, _add_batch,
                _add_serve, _add_tune, _add_route, _add_eval, _add_info):
        add(commands)
    commands.metavar = " | ".join(commands.choices)
    return list(commands.choices)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="watch a chain write, and see that the target alone writes the same",
                                 description="Decode the demo prompts with a chain of levels, then with the target "
                                             "alone; exit status 1 if any id differs.")
    parser.add_argument("--model", metavar="FOLDER",
                        help="the target (default: the demo target, with levels mxfp4 and the demo draft)")
    parser.add_argument("--prompt", metavar="TEXT", type=text, help="the text to continue (default: the demo prompts)")
    add_chain(parser, max_new_tokens=96)


def _add_quantize(commands: Any) -> None:
    parser = commands.add_parser("quantize", help="write a packed form of a model",
                                 description="Quantize a causal language model while it loads, tensor by tensor, and "
                                             "save it with its tokenizer.",
                                 epilog="A format has options of its own, such as --group-size: mlspec quantize "
                                        "--format int4 --help lists those of all formats.")
    parser.complete = _add_format_options
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("out", help="folder to write to")
    parser.add_argument("--format", metavar="WORD",
                        help="a weight format that mlspec info lists (default: that of --method, else mxfp4)")
    parser.add_argument("--activation-bits", type=int, metavar="N",
                        help="what the layers compute with unless told otherwise: 16, for mxfp4 and int4 also 8, for "
                             "int4 also 4 (default 16)")
    parser.add_argument("--activation-clip", type=clip, metavar="X",
                        help="int4, int4-int8: what the largest 4-bit code of an activation means, 0.1 to 1 as a "
                             "share of its group's largest, or with --method auto: searched on the text (default: "
                             "that of --method, else 1)")
    parser.add_argument("--skip", action="append", metavar="NAME", type=text,
                        help="a module not to quantize, by the end or start of its name or a pattern; repeat it for "
                             "more (the output head is kept, but in nested-bf16)")
    parser.add_argument("--kv-cache", metavar="WORD",
                        help="how the model keeps keys and values: int8 or int4 (default: as it computes them)")
    parser.add_argument("--head-and-embedding", action="store_true",
                        help="zipper: the output head and the embedding become codes, too")
    parser.add_argument("--dtype", metavar="WORD", default="auto",
                        help="of what is not quantized: auto (default: the model's own), float32, bfloat16 or float16")
    _add_calibration(parser)
    _add_writing(parser)
    add_json(parser)


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    """How codes are chosen on a text. Each is None where it is not given: without a method there is no text."""
    group = parser.add_argument_group("codes chosen on a text (int4, int4-int8, zipper)")
    group.add_argument("--method", metavar="WORD",
                       help="rtn, gptq, awq, smoothquant, quarot, quarot+smoothquant or, for format int4-int8, atom "
                            "and quarot+atom; all but rtn and gptq may end in +gptq; for zipper no awq and no atom "
                            "(default: the format rounds to nearest, without a text)")
    group.add_argument("--calibration", metavar="FILE", help="a text file like what the model will read")
    group.add_argument("--samples", type=positive, metavar="N", help="windows of the text (default 32)")
    group.add_argument("--tokens", type=positive, metavar="N", help="tokens of each (default 512)")
    group.add_argument("--seed", type=seed, metavar="N",
                       help="draws the windows, and the signs of rotations (default 0)")
    group.add_argument("--act-order", action="store_const", const=True,
                       help="gptq: inputs of the largest squares first")
    group.add_argument("--damping", type=float, metavar="X",
                       help="gptq: added to the Hessian's diagonal, in units of its mean (default 0.1)")
    group.add_argument("--search-bits", type=int, metavar="N",
                       help="smoothquant: activation bits of its search, 8 or 4 (default: --activation-bits, or 8)")
    group.add_argument("--rotations", metavar="FILE",
                       help="quarot: matrices in place of Hadamard's, such as SpinQuant's R.bin")
    group.add_argument("--learn-rotation", action="store_const", const=True,
                       help="quarot: learn that of the residual stream on the text first and write it to the file of "
                            "--rotations, unless it is there")
    group.add_argument("--device", metavar="NAME", help="where codes are chosen, such as cuda (default cpu)")
    group.add_argument("--evaluate", metavar="FILE", help="a text file: its perplexity before and after")
    group.add_argument("--evaluate-tokens", type=positive, metavar="N",
                       help="of that file, the first N tokens (default 32768)")
    group.add_argument("--plot", metavar="FILE.png",
                       help="draw the signal to noise of all layers over the blocks (needs matplotlib)")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    """The options of commands that write a model."""
    parser.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE",
                        help="such as 500MB or 5GB (default %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser("convert", help="write a quantized checkpoint in another format",
                                 description="Read a quantized causal language model, of this package or of another "
                                             "library, and save it in another format, with its tokenizer. No value "
                                             "changes; what a format cannot say is refused, and nothing is written.")
    parser.add_argument("source", metavar="SRC", help="folder of the checkpoint")
    parser.add_argument("target", metavar="DST", help="folder to write to; with --to gguf the file, FILE.gguf")
    parser.add_argument("--to", metavar="WORD", default="mlspec",
                        help="mlspec (default), compressed-tensors, gptq or gguf")
    _add_writing(parser)
    add_json(parser)


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="what a checkpoint is, and what becomes of it here",
                                 description="Tell how a checkpoint is stored, what its layers become here, what runs "
                                             "it and which levels fit it. No weight is loaded.")
    parser.add_argument("folder", metavar="FOLDER", help="folder of the checkpoint")
    add_json(parser)


def _add_format_options(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Those of the formats' records; help that names no format does without them, and comes at once."""
    asks_for_help = any(word in ("-h", "--help") for word in words)
    if asks_for_help and not any(word.startswith("--format") for word in words):
        return
    from hf_mlspec.cli.quantize import add_format_options

    add_format_options(parser)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser("verify", help="compare a chain with the target alone on any prompts",
                                 description="Decode prompts with a chain of levels and with the target alone; exit "
                                             "status 1 if any id differs. With --check: is a certificate that an "
                                             "earlier call wrote still one of this model and these kernels?")
    parser.add_argument("model", help="folder of the target")
    parser.add_argument("--prompts", "--prompt-file", metavar="FILE",
                        help='text with one prompt a line, or .jsonl with "prompt", "question", "turns" ... '
                             "(HumanEval, GSM8K, MT-Bench, Spec-Bench, ARC, MATH)")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--batch-size", type=positives, default=[1], metavar="N[,N...]",
                        help="prompts decoded together; several numbers: one comparison each (default 1)")
    parser.add_argument("--reference", choices=["ours", "stock"], default="ours",
                        help="the target alone through our loop or through transformers' own (default %(default)s)")
    parser.add_argument("--tolerate-ties", type=gap, metavar="GAP",
                        help="float32 only: a difference whose two best float64 logits lie closer than GAP is listed, "
                             "but does not fail")
    parser.add_argument("--certificate", metavar="FILE", help="write all that was found, and of what, as JSON")
    parser.add_argument("--badge", metavar="FILE",
                        help="put the outcome into a Markdown file, such as the README.md of the model")
    parser.add_argument("--check", metavar="CERTIFICATE", help="compare nothing, hash weights and kernels anew")
    add_chain(parser, max_new_tokens=128)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue prompts with a chain of levels",
                                 description="Continue one prompt, or those of a file one after another. The text "
                                             "appears as it is written.")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="the target")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", type=text, help="the text to continue")
    prompts.add_argument("--prompt-file", "--prompts", metavar="FILE",
                         help='text with one prompt a line, or .jsonl with "prompt", "question", "turns" ...; '
                              "-: standard input, one prompt a line")
    parser.add_argument("--stop", action="append", metavar="TEXT", type=text,
                        help="a text ends behind this; repeat it for more")
    add_chain(parser, max_new_tokens=128)
    parser.add_argument("--compare", action="store_true",
                        help="decode with the target alone too; exit status 1 if any id differs")
    parser.add_argument("--do-sample", action="store_true", help="sample instead of taking the likeliest token")
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("seed", seed)):
        parser.add_argument(f"--{name}", type=kind, metavar="N", help="with --do-sample")


def _add_batch(commands: Any) -> None:
    parser = commands.add_parser("batch", help="answer all lines of a file, on one or many devices and machines",
                                 description="Answer requests of a file, prompts or chats as in OpenAI's batch files, "
                                             "and write the answers in numbered files in the order of the input. A "
                                             "run that was ended goes on where it was.")
    parser.add_argument("input", metavar="INPUT",
                        help='JSON lines, or .parquet: {"prompt": ...}, {"messages": ...}, or "custom_id", "url" and '
                             '"body" as in OpenAI\'s batch files')
    parser.add_argument("output", metavar="OUTPUT", help="a new folder, or that of a run of the same job")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="the target, on every machine")
    add_levels(parser)
    parser.add_argument("--workers", type=positive, metavar="N",
                        help="chains on devices of their own, by Ray (default: one in this process; with --ray one a "
                             "GPU of the cluster)")
    parser.add_argument("--ray", metavar="ADDRESS", type=text,
                        help="of a Ray cluster, or auto (default: where --workers is above 1, this machine alone)")
    parser.add_argument("--tensor-parallel", type=positive, default=1, metavar="N",
                        help="processes of one machine, each on a device of its own, that share the model of a worker "
                             "(default %(default)s)")
    parser.add_argument("--slots", type=positive, default=8, metavar="N",
                        help="answers that a worker decodes at a time (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=1024, metavar="N",
                        help="tokens of an answer at most, also of one that asks for no number (default %(default)s)")
    parser.add_argument("--lines-per-file", type=positive, default=100, metavar="N",
                        help="answers in one file of OUTPUT; a lost worker costs two files at most (default "
                             "%(default)s)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N",
                        help="of sampled lines that name none, with the number of their line (default %(default)s)")
    parser.add_argument("--served-model-name", metavar="NAME", type=text,
                        help='what lines may say as "model" (default: the folder, as given)')
    parser.add_argument("--chat-template", metavar="FILE", type=text,
                        help="a Jinja template of chats (default: the tokenizer's own)")
    add_drafting(parser)
    add_json(parser)


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="answer clients of OpenAI's API with a chain of levels",
                                 description="Serve chats and completions over HTTP, as OpenAI's clients ask for "
                                             "them, until a signal says to stop. Every answer is that of its request "
                                             "alone.")
    parser.add_argument("model", nargs="?", metavar="MODEL", type=model,
                        help="folder of the target (default: the demo target, with levels mxfp4 and the demo draft, "
                             "called demo)")
    add_levels(parser)
    add_drafting(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME",
                        help="the address to listen on (default %(default)s: this machine alone)")
    parser.add_argument("--port", type=port, default=8000, metavar="N", help="0: a free one (default %(default)s)")
    parser.add_argument("--api-key-file", metavar="FILE",
                        help="a file of keys, one a line, of which clients must send one (default: none is asked for)")
    parser.add_argument("--served-model-name", metavar="NAME", type=text,
                        help="what clients call the model (default: its folder, as given)")
    parser.add_argument("--chat-template", metavar="FILE", type=text,
                        help="a Jinja template of chats, or plain: one message a line (default: the tokenizer's own)")
    parser.add_argument("--slots", type=positive, default=8, metavar="N",
                        help="answers decoded at a time (default %(default)s)")
    parser.add_argument("--prefill-chunk", type=positive, default=512, metavar="N",
                        help="the most tokens of a prompt read between two rounds of running answers (default "
                             "%(default)s)")
    parser.add_argument("--prefix-cache", type=text, default="256MiB", metavar="BYTES",
                        help="keys and values kept of prompts, for those that begin alike: 1GiB, or 0 for none "
                             "(default %(default)s)")
    parser.add_argument("--stream-interval", type=interval, default=0.04, metavar="SECONDS",
                        help="least time between two events of a stream behind its first: what shorter rounds bring "
                             "comes together; 0: an event for each round (default %(default)s)")
    parser.add_argument("--grace", type=seconds, default=30.0, metavar="SECONDS",
                        help="that running answers have to end after a signal to stop (default %(default)s)")
    _add_serving_limits(parser)


def _add_serving_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for name, default, what in (
        ("max-new-tokens", 1024, "tokens of one answer, also of one that asks for no number"),
        ("max-queue", 256, "answers that wait for a slot"),
        ("max-body", 1_000_000, "bytes of one request"),
        ("max-choices", 16, "answers of one request, n times its prompts"),
    ):
        group.add_argument(f"--{name}", type=positive, default=default, metavar="N",
                           help=f"{what} (default %(default)s)")
    group.add_argument("--max-prompt-tokens", type=positive, default=0, metavar="N",
                       help="tokens of one prompt (default: as many as the model has positions)")
    group.add_argument("--max-seconds", type=seconds, default=600.0, metavar="SECONDS",
                       help="from a request to the end of its answer (default %(default)s)")


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser("tune", help="measure a chain's models, and show which draft lengths follow",
                                 description="Time forward passes of the target and of every level, and show which "
                                             "levels would draft how many tokens. The next calls use what was "
                                             "measured, instead of measuring briefly themselves.")
    parser.add_argument("model", help="folder of the target")
    add_levels(parser)
    parser.add_argument("--output", metavar="FILE", help="write a profile too, for SpeculationConfig(profile=FILE)")
    parser.add_argument("--plot", metavar="FILE.png",
                        help="draw the speedup over acceptance and over the cost of a draft (needs matplotlib)")
    parser.add_argument("--repeats", type=positive, default=15, metavar="N",
                        help="passes for each number of tokens, at most; the least time counts (default %(default)s)")
    add_json(parser)


def _add_route(commands: Any) -> None:
    parser = commands.add_parser("route", help="train a router that picks the planes of each prompt, and show it",
                                 description="A router reads as many bit-planes of each block as a prompt needs.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="train | show")
    train = actions.add_parser("train", help="train a router on text files",
                               description="Distil a router from the model in full precision. A killed run goes on "
                                           "with the same command.")
    train.add_argument("model", metavar="MODEL", help="folder of the model, dense or in bit-planes")
    train.add_argument("--data", action="append", required=True, metavar="FILE",
                       help="a text file; repeat it for other kinds of queries, of each as many are taken")
    train.add_argument("--target-bits", type=float, required=True, metavar="N", help="bits of a weight on average")
    train.add_argument("--out", required=True, metavar="FILE", help="the router, such as router.safetensors")
    train.add_argument("--widths", type=numbers(int), metavar="N,N...", help="numbers of planes (default 2,3,4,6,8)")
    train.add_argument("--samples", type=positive, default=256, metavar="N", help="queries (default %(default)s)")
    train.add_argument("--tokens", type=positive, default=128, metavar="N",
                       help="tokens of a query and what follows it (default %(default)s)")
    for name, kind, told in (("query-tokens", positive, "first tokens that the router sees (default 64)"),
                             ("steps", positive, "steps of training (default 200)"),
                             ("batch", positive, "queries a step (default 8)"),
                             ("learning-rate", float, "of Adam (default 0.02)"), ("seed", seed, "default 0"),
                             ("hard-share", float, "of the steps, the last ones, that train on what is chosen instead "
                                                   "of mixtures (default 0)")):
        train.add_argument(f"--{name}", type=kind, metavar="N", help=told)
    train.add_argument("--every", metavar="prompt|step",
                       help="a choice for each prompt (default), or one more for each token behind it")
    train.add_argument("--plot", metavar="FILE.png", help="draw loss and bits over the steps (needs matplotlib)")
    shown = actions.add_parser("show", help="how many planes each block reads for given prompts")
    shown.add_argument("model", metavar="MODEL", help="folder of the model, dense or in bit-planes")
    shown.add_argument("--router", metavar="FILE", help="what mlspec route train wrote (default: the model's own)")
    shown.add_argument("--prompts", required=True, metavar="FILE", help="text with a prompt a line, or .jsonl")
    shown.add_argument("--count", type=positive, metavar="N", help="the first N prompts (default: all)")
    shown.add_argument("--plot", metavar="FILE.png", help="draw planes by block and prompt (needs matplotlib)")
    for own in (train, shown):
        add_place(own)



def _add_eval(commands: Any) -> None:
    parser = commands.add_parser("eval", help="score a chain on tasks of lm-eval, with all of lm-eval's options",
                                 add_help=False, allow_abbrev=False)
    parser.passes_on = True  # to lm-eval's own parser, --help too: it is asked for when the command runs
    parser.add_argument("--data", metavar="FOLDER", help="where the data of the mlspec_... tasks lie")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes that share the documents, by Ray")
    parser.add_argument("--ray", metavar="ADDRESS", type=text, help="of a Ray cluster, or auto")


def _add_info(commands: Any) -> None:
    parser = commands.add_parser("info", help="versions, devices, formats and kernels")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="a checkpoint: what mlspec inspect tells of it")
    parser.add_argument("--kernels", action="store_true", help="a table of the kernel behind every op, too")
    add_json(parser)
