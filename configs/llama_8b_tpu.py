"""The Llama-3 8B shape on 64 TPU v5p chips (4x4x4).

Command:   jaxtrain train --config=configs/llama_8b_tpu.py:'/data/text/**/*.txt' --workdir=/data/runs/llama_8b
Hardware:  64 v5p chips, 95 GB each. fp32 masters, moments and accumulator: 16 B x 8.03 G / 64 = 2.0 GB a chip.
Batch:     128 rows x 4096 tokens x 2 micro-batches = 1,048,576 tokens a step, two rows a chip and micro-batch.
Reached:   not run yet: no such hardware was at hand, and several processes come with the launchers; tests trace it.
"""

from jaxtrain import config


def get_config(arg: str = ""):
    """``arg``: glob of the training text. It is read as bytes; the vocabulary only has the published size."""
    c = config.default()
    c.steps = 20_000
    c.data.paths = (arg or "stdlib",)
    c.data.micro_batch_size = 128
    c.data.sequence_length = 4096
    c.model.layers, c.model.d_model, c.model.heads, c.model.kv_heads, c.model.d_ff = 32, 4096, 32, 8, 14336
    c.model.vocab_size = 128_256
    c.model.max_length = 4096
    c.model.rope_theta = 500_000.0
    c.model.remat = "full"
    c.accumulation.k = 2
    c.optim.learning_rate = 3e-4
    c.optim.warmup_steps = 1000
    c.optim.end_learning_rate = 3e-5
    c.optim.weight_decay = 0.1
    c.mesh.fsdp = 64
    c.checkpoint.every_steps = 500
    c.eval.every_steps = 1000
    c.eval.rows = 4096
    return c
