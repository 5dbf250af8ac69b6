"""A model of one's own, from a checkpoint's config.json or a TOML file: exact parameters, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.workloads.costs.parameter_table import num_active_parameters, num_parameters
from parbench.workloads.planner.models import MODELS, find_model, model_of
from tests.support.paths import Command

# written by hand from the published config.json of each
QWEN = {  # Qwen/Qwen2.5-0.5B: its model card says 0.49 B
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 24,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}
GPT2 = {  # openai-community/gpt2: 124 M
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "n_ctx": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
}
DEEPSEEK = {  # deepseek-ai/DeepSeek-V3
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
OSS = {  # openai/gpt-oss-20b: arXiv 2508.10925, table 1 says 20.91 B
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
QWEN_MOE = {  # Qwen/Qwen2-57B-A14B: 57.41 B, arXiv 2407.10671, table 1
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "mlp_only_layers": [],
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
EXACT: list[
    tuple[dict[str, Any], int, float]
] = [  # counted by hand; and the billions that a token meets
    (QWEN, 494_032_768, 0.494),
    (GPT2, 124_439_808, 0.124),
    (DEEPSEEK, 671_026_419_200, 37.55),
    (OSS, 20_914_757_184, 4.19),
    (QWEN_MOE, 57_408_658_944, 14.2),
]


def written(folder: Path, content: object) -> str:
    file = folder / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_a_config_json_has_exactly_the_parameters_of_its_checkpoint(tmp_path: Path) -> None:
    for content, parameters, met in EXACT:
        step = model_of(written(tmp_path, content))
        assert num_parameters(step.shape, step.moe) == parameters, content["model_type"]
        assert num_active_parameters(step.shape, step.moe) / 1e9 == pytest.approx(met, rel=0.01), (
            content["model_type"]
        )
    found = model_of(written(tmp_path, DEEPSEEK), 4096)
    assert (found.shape, found.moe) == (MODELS["deepseek-v3"].shape, MODELS["deepseek-v3"].moe)
    assert found.name == tmp_path.name


def test_what_a_config_json_says_and_nothing_counts_is_told_once(
    tmp_path: Path, parbench: Command
) -> None:
    for content, told in (
        (DEEPSEEK, "num_nextn_predict_layers, quantization_config"),
        (OSS, "layer_types, sliding_window"),
        ({**QWEN, "layers_that_skip": [3]}, "layers_that_skip"),
    ):
        path = written(tmp_path, content)
        assert find_model(path, 1024).notes == (f"{path}: not taken into account: {told}",)
    shown = parbench("plan", "--model", path, "--mesh", "dp=8", "--sequence", "1024")
    assert f"{path}: not taken into account: layers_that_skip" in shown.stdout
    assert find_model(written(tmp_path, QWEN), 1024).notes == ()  # whose window is off
    assert find_model(path).notes == (
        f"{path}: without --sequence, sequences are of all 32768 tokens that it allows",
    )


def test_a_wrong_config_json_is_refused_by_file_key_and_what_is_allowed(
    tmp_path: Path, parbench: Command
) -> None:
    for content, told in (
        ("{", "is no JSON"),
        (
            {**QWEN, "model_type": "qwen"},
            r": model_type 'qwen' is not llama, .* or gpt_oss; did you mean 'qwen3'",
        ),
        (
            {**QWEN, "hidden_size": "896"},
            ": hidden_size = '896' is no whole number from 1 to 16777216",
        ),
        ({**QWEN, "num_hidden_layers": 5000}, r": layers\(5000\) > 4096"),
        ({**QWEN, "vocab_size": None}, " has no vocab_size, which a qwen2 has"),
        ({**QWEN, "num_key_value_heads": 3}, r": heads\(14\) % kv_heads\(3\) != 0"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, ": moe_layer_freq = 2 is not 1"),
        ({**DEEPSEEK, "num_experts_per_tok": 300}, r": top_k\(300\) > experts\(256\)"),
        (
            {**QWEN_MOE, "mlp_only_layers": [1, 3]},
            r": mlp_only_layers = \[1, 3\] are not the first layers",
        ),
        (
            {**QWEN_MOE, "shared_expert_intermediate_size": 5000},
            r"size\(5000\) % moe_intermediate_size\(2560\) != 0",
        ),
    ):
        path = written(tmp_path, content)
        with pytest.raises(UserError, match=told) as caught:
            find_model(path)
        assert str(caught.value).startswith(f"model file {path}")
    refused = parbench("plan", "--model", path, "--gpus", "8")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    with pytest.raises(UserError, match=r"absent\.json cannot be read: No such file"):
        find_model("absent.json")


OWN = """
name = "mine"
layers = 61
hidden = 7168
heads = 128
kv_heads = 128
ffn = 18432
sequence = 4096
vocabulary = 129280
biases = ["router"]

[latent]
q_lora_rank = 1536
kv_lora_rank = 512
qk_nope_head_dim = 128
qk_rope_head_dim = 64
v_head_dim = 128

[mixture]
experts = 256
top_k = 8
expert_ffn = 2048
shared = 1
dense_layers = 3
"""


def test_a_toml_file_declares_a_model_and_is_refused_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(OWN)
    found, known = model_of(str(file)), MODELS["deepseek-v3"]
    assert (found.name, found.shape, found.moe) == ("mine", known.shape, known.moe)
    file.write_text(
        OWN.replace('name = "mine"', "")
        .replace("kv_heads = 128", "kv_heads = 8")
        .split("[latent]")[0]
    )
    assert (
        model_of(str(file)).name,
        model_of(str(file)).moe,
        model_of(str(file)).shape.kv_heads,
    ) == ("mine", None, 8)
    for part, wrong, told in (
        ("layers = 61", "layers = 0", r">= 1.*\$.layers"),
        ("hidden =", "hiden =", "unknown field `hiden`.*; allowed are .*did you mean 'hidden'"),
        (
            "top_k = 8",
            "topk = 8",
            "unknown field `topk`.*; allowed are experts, .*did you mean 'top_k'",
        ),
        (
            '["router"]',
            '["rooter"]',
            "'rooter'.*allowed are q, k, v, .* or experts.*did you mean 'router'",
        ),
        (OWN, "layers = ", "is no TOML"),
    ):
        file.write_text(OWN.replace(part, wrong, 1))
        with pytest.raises(UserError, match=told) as caught:
            model_of(str(file))
        assert str(caught.value).startswith(f"model file {file}")
