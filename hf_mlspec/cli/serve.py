"""How does a chain answer clients of OpenAI's API? A server on a port, until it is told to stop."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from ..demo_pair import demo_pair
from ..engines.prefixes import bytes_of
from .request import chain_config, load_target

_PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"  # --chat-template plain
SERVER_PACKAGES = ("fastapi", "uvicorn", "openai", "prometheus_client")


def run_serve(args: argparse.Namespace) -> int:
    try:
        from ..serving.limits import Limits
        from ..serving.server import Http, Options, listen, read_keys, serve_model
    except ImportError as error:
        if error.name not in SERVER_PACKAGES:
            raise
        raise ValueError(f"{error.name} is not installed; pip install 'hf-mlspec[serve]' brings what a server "
                         "needs") from error
    path, levels, name = _chain(args)
    limits = Limits(prompt_tokens=args.max_prompt_tokens, new_tokens=args.max_new_tokens, queue=args.max_queue,
                    body=args.max_body, choices=args.max_choices, seconds=args.max_seconds)
    config = chain_config(args, levels)
    keys = [] if args.api_key_file is None else read_keys(args.api_key_file)
    prefix_cache = bytes_of(args.prefix_cache, "--prefix-cache")
    listening = listen(args.host, args.port)
    with listening, contextlib.closing(Http(listening)) as http:  # a port that is taken is no reason to load a model
        model, tokenizer = load_target(path, args)
        _set_template(tokenizer, args.chat_template or (None if args.model else "plain"))
        options = Options(args.served_model_name or name, args.slots, keys, limits, config,
                          prefill_chunk=args.prefill_chunk, prefix_cache=prefix_cache, every=args.stream_interval,
                          grace=args.grace)
        backend = serve_model(model, tokenizer, levels, options, http.end)
        http.begin(options.setup(model, tokenizer))
        host, port = listening.getsockname()[:2]
        listening.close()  # HTTP has it: when that takes no more, nobody is to wait for an answer
        print(f"mlspec serve: {options.name} on http://{host}:{port}", file=sys.stderr, flush=True)
        http.run(backend)
    return 0


def _chain(args: argparse.Namespace) -> tuple[str, list[Any], str]:
    """Target, levels, and what the target is called."""
    if args.model:
        return args.model, args.levels or [], args.model
    target, draft = demo_pair()
    return target, args.levels or ["mxfp4", draft], "demo"


def _set_template(tokenizer: Any, given: str | None) -> None:
    """The chat template that was asked for, in place of the tokenizer's own."""
    if given == "plain":
        tokenizer.chat_template = _PLAIN
    elif given is not None:
        tokenizer.chat_template = Path(given).read_text(encoding="utf-8")
