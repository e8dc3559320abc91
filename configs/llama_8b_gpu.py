"""The Llama-3 8B shape on one host with eight GPUs.

Command:   jaxtrain train --config=configs/llama_8b_gpu.py:'/data/text/**/*.txt' --workdir=/data/runs/llama_8b
Hardware:  8 x H100 80 GB, one process. fp32 masters, moments and accumulator: 16 B x 8.03 G / 8 = 16.1 GB a GPU.
Batch:     8 rows x 4096 tokens x 16 micro-batches = 524,288 tokens a step, one row a GPU and micro-batch.
Reached:   not run yet: no such hardware was at hand; tests trace it on an abstract mesh. --config.model.attention=cudnn
           is there for NVIDIA GPUs and not measured yet.
"""

from jaxtrain import config


def get_config(arg: str = ""):
    """``arg``: glob of the training text. It is read as bytes; the vocabulary only has the published size."""
    c = config.default()
    c.steps = 20_000
    c.data.paths = (arg or "stdlib",)
    c.data.micro_batch_size = 8
    c.data.sequence_length = 4096
    c.model.layers, c.model.d_model, c.model.heads, c.model.kv_heads, c.model.d_ff = 32, 4096, 32, 8, 14336
    c.model.vocab_size = 128_256
    c.model.max_length = 4096
    c.model.rope_theta = 500_000.0
    c.model.remat = "full"
    c.accumulation.k = 16
    c.optim.learning_rate = 3e-4
    c.optim.warmup_steps = 1000
    c.optim.end_learning_rate = 3e-5
    c.optim.weight_decay = 0.1
    c.mesh.fsdp = 8
    c.checkpoint.every_steps = 500
    c.eval.every_steps = 1000
    c.eval.rows = 1024
    return c
