"""A small byte-level language model on Python's own standard library, on any machine.

Command:   jaxtrain train --config=configs/quickstart.py --workdir=runs/quickstart
Hardware:  two CPU cores (5 min 25 s while other work took most of them); any accelerator.
Batch:     16 rows x 256 tokens x 1 micro-batch = 4,096 tokens a step; 250 steps = 1.0 M of the text's 11.7 M bytes.
Reached:   2.602 bits per byte on held-out files (bigram model 3.556, unigram model 4.850); see docs/benchmarks.md
"""

from jaxtrain import config


def get_config(arg: str = ""):
    c = config.default()
    c.steps = 250
    c.log_every_steps = 10
    c.data.paths = ("stdlib",)
    c.data.micro_batch_size = 16
    c.data.sequence_length = 256
    c.model.layers, c.model.d_model, c.model.heads, c.model.kv_heads, c.model.d_ff = 4, 128, 4, 4, 384
    c.model.max_length = 256
    c.optim.learning_rate = 4e-3
    c.optim.warmup_steps = 30
    c.optim.weight_decay = 0.1
    c.optim.end_learning_rate = 2e-4
    c.precision.compute = "float32"  # CPUs emulate bfloat16
    c.checkpoint.every_steps = 50
    c.eval.every_steps = 125
    c.eval.rows = 200
    c.sample.tokens = 240
    return c
