"""The digest of a file is the one that an engine reports of the weights it runs."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import save_file

from honed.recalib.registry.weights_digest import weights_digests


def as_the_engine_does(tensors):
    """attach.swap.swap.Swapper.checksum, on tensors at hand."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def checkpoint(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16, torch.float16])
def test_whatever_the_type_in_the_file_and_in_the_engine(tmp_path, stored, served):
    torch.manual_seed(0)
    tensors = {"norm.weight": torch.randn(7), "fc.weight": torch.randn(5, 3) * 100, "layers.0.x": torch.randn(2, 2) * 1e-6}
    tensors = {name: tensor.to(stored) for name, tensor in tensors.items()}
    path = checkpoint(tmp_path)
    save_file(tensors | {"lm_head.weight": torch.zeros(2, dtype=stored)}, path)
    assert as_the_engine_does({name: tensor.to(served) for name, tensor in tensors.items()}) in weights_digests(path)


def test_other_weights_and_other_types_are_told_apart(tmp_path):
    path = checkpoint(tmp_path)
    save_file({"fc.weight": torch.ones(3)}, path)
    assert as_the_engine_does({"fc.weight": torch.ones(3) * 1.01}) not in weights_digests(path)
    save_file({"fc.weight": torch.ones(3, dtype=torch.int8)}, path)
    with pytest.raises(ValueError, match=r"fc\.weight is stored as I8"):
        weights_digests(path)


@pytest.mark.fault("a drafter under other tensor names")
@pytest.mark.parametrize("config", [{"attention_bias": True}, {"transformer_layer_config": {"attention_bias": True}}, {}])
def test_other_names_are_the_same_tensors_and_what_vllm_ignores_counts_for_nothing(tmp_path, config):
    path = checkpoint(tmp_path, **config)
    tensors = {"fc.weight": torch.ones(2), "hidden_norm.weight": torch.ones(3), "layers.0.norm.weight": torch.ones(4)}
    bias = {"layers.0.self_attn.q_proj.bias": torch.ones(2)}
    theirs = {"encoder.fc.weight": torch.ones(2), "encoder.output_norm_enc.weight": torch.ones(3)}
    ignored = {"t2d": torch.ones(3, dtype=torch.bool), "layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2).double()}
    save_file(theirs | {"midlayer.norm.weight": torch.ones(4)} | bias | ignored, path)
    assert as_the_engine_does(tensors | bias if config else tensors) in weights_digests(path)


@pytest.mark.parametrize(
    "config",
    [{"text_config": {"model_type": "qwen3_5_text", "qkv_bias": True}}, {"model_type": "mimo"}],
    ids=["Qwen3.5", "MiMo"],
)
def test_an_mtp_head_s_biases_count_where_vllm_has_them(tmp_path, config):
    path = checkpoint(tmp_path, **config)
    theirs = {"model.mtp_layers.0.self_attn.q_proj.bias": torch.ones(2), "mtp.fc.weight": torch.ones(3)}
    save_file(theirs, path)
    ours = {"mtp_layers.0.self_attn.q_proj.bias": torch.ones(2), "fc.weight": torch.ones(3)}
    assert as_the_engine_does(ours) in weights_digests(path)


@pytest.mark.fault("a drafter under other tensor names")
def test_two_names_of_one_tensor_are_refused(tmp_path):
    path = checkpoint(tmp_path)
    save_file({"fc.weight": torch.ones(3), "encoder.fc.weight": torch.ones(3)}, path)
    with pytest.raises(ValueError, match=r"are the same tensor: keep one"):
        weights_digests(path)
