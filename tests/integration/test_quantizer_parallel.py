"""Does transformers' tensor parallelism split packed layers, save what it split as one model, and refuse others?"""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_mlspec import MLSpecConfig
from tests.models import tiny

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo here"),
    pytest.mark.filterwarnings("ignore:no compiled kernel"),
]

# Two processes, half of every layer each; argv: the folder. int4 is quantized while loading, mxfp4 was before.
PROGRAM = """
import sys
import torch
import hf_mlspec
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

torch.set_num_threads(1)
folder, found = sys.argv[1], {}
start = torch.arange(3, 17).view(2, 7)
for format, source, options in (
    ("int4", "dense", {"quantization_config": hf_mlspec.MLSpecConfig("int4", group_size=32)}), ("mxfp4", "mxfp4", {})
):
    model = AutoModelForCausalLM.from_pretrained(
        f"{folder}/{source}", dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2),
        **options,
    )
    half = model.model.layers[0].mlp.down_proj.weight_packed.to_local()
    with torch.no_grad():
        logits = model(start).logits
    ids = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=4, do_sample=False)
    model.save_pretrained(f"{folder}/saved-{format}")
    found[format] = {"half": tuple(half.shape), "logits": logits, "ids": ids}
refused = {}
for format in ("bitplanes", "nested"):
    try:
        AutoModelForCausalLM.from_pretrained(
            f"{folder}/dense", distributed_config=DistributedConfig(tp_plan="auto", tp_size=2),
            quantization_config=hf_mlspec.MLSpecConfig(format),
        )
    except ValueError as error:
        refused[format] = str(error)
found["refused"] = [None, None]
torch.distributed.all_gather_object(found["refused"], refused)
if torch.distributed.get_rank() == 0:
    torch.save(found, f"{folder}/found.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    # Wide enough that half of in_features is whole groups.
    tiny(dtype=torch.float32, hidden_size=128, intermediate_size=256, head_dim=32).save_pretrained(tmp_path / "dense")
    alone = {}
    for config in (MLSpecConfig("int4", group_size=32), MLSpecConfig("mxfp4")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
        model.save_pretrained(tmp_path / config.format)
        alone[config.format] = model
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    on_the_cpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # one GPU does not serve two processes
    ran = subprocess.run([*command, tmp_path / "program.py", tmp_path], capture_output=True, text=True, timeout=900,
                         env=on_the_cpu)
    assert ran.returncode == 0, ran.stderr
    ids = torch.arange(3, 17).view(2, 7)
    told = torch.load(tmp_path / "found.pt")
    first, second = told.pop("refused")
    assert first == second  # before anything is read, so that no process goes on to another error
    assert first.keys() == {"bitplanes", "nested"}
    assert all(why.startswith("2 processes are to share the model") for why in first.values())
    for format, found in told.items():
        assert found["half"] == (128, 64)  # codes of [128, 256], its inputs halved
        # Sums of two halves round otherwise, and with them the bfloat16 inputs of the next layer.
        assert torch.allclose(found["logits"], alone[format](ids).logits, atol=0.05)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(found["ids"], alone[format].generate(ids, **options))
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / f"saved-{format}").state_dict()
        assert whole.keys() == alone[format].state_dict().keys()
        assert all(torch.equal(whole[name], tensor) for name, tensor in alone[format].state_dict().items())
