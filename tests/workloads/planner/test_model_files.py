"""A model can be read from the config.json of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.workloads.costs.parameter_table import count_active_parameters, count_parameters
from parbench.workloads.planner.models import load_model

Config = dict[str, Any]

# Each is written by hand from the published config.json.
QWEN: Config = {  # Qwen/Qwen2.5-0.5B: its model card states 0.49 B.
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
GPT2: Config = {  # openai-community/gpt2: 124 M
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
}
DEEPSEEK: Config = {  # deepseek-ai/DeepSeek-V3
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
QWEN_MOE: Config = {  # Qwen/Qwen3-235B-A22B: its model card states 235 B, 22 B activated.
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def write_config(folder: Path, config: Config | str) -> str:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "parameters", "active_billions"),
    [
        (QWEN, 494_032_768, 0.494),
        (GPT2, 124_439_808, 0.124),
        (DEEPSEEK, 671_026_419_200, 37.55),
        (QWEN_MOE, 235_093_634_560, 22.2),
    ],
)
def test_config_has_parameters_of_checkpoint(
    tmp_path: Path, config: Config, parameters: int, active_billions: float
) -> None:
    model = load_model(write_config(tmp_path, config))
    active = count_active_parameters(model.shape, model.moe)
    assert count_parameters(model.shape, model.moe) == parameters
    assert active / 1e9 == pytest.approx(active_billions, rel=0.01)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "JSON"),
        ({**QWEN, "model_type": "qwen"}, "model_type 'qwen'.*qwen3"),
        ({**QWEN, "hidden_size": "896"}, "hidden_size = '896'"),
        ({**QWEN, "num_hidden_layers": 5000}, r"layers\(5000\) > 4096"),
        ({**DEEPSEEK, "num_experts_per_tok": 300}, r"top_k\(300\) > experts\(256\)"),
        ({**QWEN_MOE, "mlp_only_layers": [1, 3]}, "mlp_only_layers"),
    ],
)
def test_config_error_names_file_and_key(
    tmp_path: Path, config: Config | str, message: str
) -> None:
    with pytest.raises(UserError, match=f"config.json.*{message}"):
        load_model(write_config(tmp_path, config))


def test_missing_model_file_is_rejected() -> None:
    with pytest.raises(UserError, match=r"absent\.json cannot be read"):
        load_model("absent.json")
