"""Does anything ask the network while a model loads and writes? All of it runs where sockets are forbidden."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import socket
asked = []

def forbidden(*what, **more):
    asked.append(what)
    raise PermissionError("no socket may be made here")

socket.socket.__init__ = forbidden
for name in ("create_connection", "getaddrinfo", "gethostbyname", "socketpair", "create_server"):
    setattr(socket, name, forbidden)
import sys
sys.addaudithook(lambda event, given: forbidden(event) if event.startswith("socket.") else None)

if sys.argv[1] == "breaks":
    try:
        socket.socket()
    except PermissionError:
        print("asked", len(asked))
    sys.exit()
import torch
import hf_mlspec
from transformers import AutoModelForCausalLM, AutoTokenizer

target, draft = map(str, hf_mlspec.demo_pair())
model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(target)
ids = tokenizer("def area(radius):", return_tensors="pt")
alone = model.generate(**ids, max_new_tokens=8)
chain = model.generate(**ids, max_new_tokens=8, assistant_models=["mxfp4", draft], assistant_tokenizers=None)
assert alone.tolist() == chain.tolist()
print("asked", len(asked), "wrote", chain.shape[1])
"""


def said(word: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, word], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_a_chain_loads_and_writes_without_a_socket():
    assert said("runs").startswith("asked 0 wrote ")


def test_a_socket_is_seen():
    assert said("breaks") == "asked 1"
