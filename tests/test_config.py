"""Every key, its type, its bounds, and what a person is told who gets one wrong."""

import dataclasses
import math
import pathlib
import re

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxtrain import cli, config
from jaxtrain.config import KEYS, ConfigError
from jaxtrain.horizon import Batching

ZERO_OR_MORE = (
    "model.vocab_size", "optim.schedule_steps", "optim.warmup_steps", "nonfinite.max_consecutive",
    "checkpoint.every_steps", "eval.every_steps", "eval.rows", "sample.tokens", "seed",
    "optim.decay_steps", "checkpoint.keep_every_steps", "checkpoint.keep_best",
)  # fmt: skip
ONE_OR_MORE = (
    "steps", "log_every_steps", "data.micro_batch_size", "model.layers", "model.d_model", "model.heads",
    "model.kv_heads", "model.d_ff", "accumulation.k", "checkpoint.keep_last", "precision.growth_windows",
    "model.stages", "loss.vocab_chunks", "checkpoint.max_failures",
)  # fmt: skip
NOT_NEGATIVE = (
    "data.held_out_fraction", "model.dropout", "optim.learning_rate", "optim.end_learning_rate", "optim.b1", "optim.b2",
    "optim.eps", "optim.weight_decay", "optim.momentum", "optim.clip_norm", "optim.ema", "sample.temperature",
    "loss.z", "loss.label_smoothing", "checkpoint.every_s", "checkpoint.failures_per_day",
)  # fmt: skip
BELOW_ONE = ("model.dropout", "loss.label_smoothing", "data.held_out_fraction", "optim.b1", "optim.b2")
RESUMABLE = {
    "steps", "log_every_steps", "compile_cache", "model.remat", "model.attention", "model.scan_layers",
    "accumulation.mechanism", "nonfinite.max_consecutive", "mesh.slice", "mesh.data", "mesh.fsdp", "mesh.tensor",
    "checkpoint.every_steps", "checkpoint.every_s", "checkpoint.auto", "checkpoint.failures_per_day",
    "checkpoint.timeout_s", "checkpoint.max_failures", "checkpoint.keep_last", "checkpoint.keep_every_steps",
    "checkpoint.keep_best", "eval.every_steps", "eval.rows", "sample.tokens", "sample.prompt",
    "sample.temperature", "loss.vocab_chunks",
}  # fmt: skip
CHOICES = {
    "data.name": "text digits", "model.name": "transformer mlp resnet", "model.running_stats": "sequential pooled",
    "model.remat": "none attention dots full", "model.attention": "xla cudnn",
    "model.scan_layers": "auto yes no", "accumulation.mechanism": "multisteps scan scan_deferred",
    "optim.name": "adamw sgd lion adafactor muon",
    "optim.schedule": "constant linear warmup_cosine warmup_stable_decay inverse_sqrt",
    "precision.compute": "bfloat16 float32 float16",    "nonfinite.skip": "window micro",
}  # fmt: skip
NEEDS = {  # what else a choice asks for
    "digits": {"model__name": "mlp"}, "mlp": {"data__name": "digits"}, "resnet": {"data__name": "digits"},
    "pooled": {"data__name": "digits", "model__name": "resnet"},
}  # fmt: skip
NUMBERS = [name for name, key in KEYS.items() if type(key.default) in (int, float)]


def made(**values: object) -> ConfigDict:
    """The defaults with some keys set, unchecked; ``optim__b1`` is ``optim.b1``."""
    c = config.default()
    for name, value in values.items():
        config.assign(c, name.replace("__", "."), value)
    return c


def refused(name: str, value: object, match: str) -> None:
    c = config.default()
    config.assign(c, name, value)
    with pytest.raises(ConfigError, match=match):
        config.resolve(c)


# ---- the keys ----------------------------------------------------------------------------------------------------


def test_every_key_says_what_it_means_and_its_default_is_allowed():
    assert config.flat(config.default()) == {name: key.default for name, key in KEYS.items()}
    assert len(KEYS) <= 80
    for name, key in KEYS.items():
        assert key.help, name
        assert name.count(".") <= 1, name
        assert type(key.default) in (int, float, bool, str, tuple), name
        assert not key.choices or key.default in key.choices, name
    config.resolve(config.default())
    assert {name for name, key in KEYS.items() if key.free} == RESUMABLE
    assert {name: " ".join(key.choices) for name, key in KEYS.items() if key.choices} == CHOICES
    with pytest.raises(dataclasses.FrozenInstanceError):
        KEYS["steps"].low = 0


WRONG = {int: [1.5, 2.0, "2", True, None], float: ["0.1", None], bool: [1, 0.0, "true", None],
         str: [3, None, True, ("xla",)], tuple: ["stdlib", ("a", 1), ["a", None], None, 3]}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_every_key_refuses_values_of_other_types_by_name(name):
    for value in WRONG[type(KEYS[name].default)]:
        refused(name, value, rf"^config: {name}=.* is .*not .*: .*\.$")


def test_harmless_conversions():
    c = config.resolve(made(optim__learning_rate=1, data__paths=["a", "b"], sample__temperature=0))
    assert (c.optim.learning_rate, c.data.paths, c.sample.temperature) == (1.0, ("a", "b"), 0.0)
    assert type(c.optim.learning_rate) is type(c.sample.temperature) is float
    refused("steps", np.int64(5), r"steps=.* is int64, not a whole number")  # its JSON would not round-trip


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_floor_and_no_number_is_infinite(name):
    least = {**dict.fromkeys(ZERO_OR_MORE, 0), **dict.fromkeys(ONE_OR_MORE, 1), **dict.fromkeys(NOT_NEGATIVE, 0.0)}
    least |= {"precision.loss_scale": 1.0, "data.sequence_length": 2, "model.max_length": 2, "model.rope_theta": 1.0}
    least["checkpoint.timeout_s"] = 1.0
    least |= dict.fromkeys(("mesh.slice", "mesh.data", "mesh.fsdp", "mesh.tensor"), -1)
    below = least[name] - (1 if type(KEYS[name].default) is int else 1e-9)
    refused(name, below, rf"^config: {name}={below} is outside \S+ (or more|\.\. \S+): ")
    if type(KEYS[name].default) is float:
        for value in (math.nan, math.inf, -math.inf):
            refused(name, value, rf"^config: {name}={value} is outside ")


@pytest.mark.parametrize("name", [*BELOW_ONE, "optim.momentum", "optim.ema"])
def test_fractions_have_a_ceiling(name):
    refused(name, 1.0 if name in BELOW_ONE else 1.001, rf"^config: {name}=1\.\d+ is outside \S+ \.\. ")


def test_an_eps_of_zero_is_refused():
    """Adam divides 0 by it for every parameter without a gradient, as the rows of unused tokens: NaN for ever."""
    refused("optim.eps", 0.0, r"^config: optim\.eps=0\.0 is outside ")


def test_the_seed_is_one_that_rng_takes():
    assert config.resolve(made(seed=2**32 - 1)).seed == 2**32 - 1
    refused("seed", 2**32, r"^config: seed=4294967296 is outside 0 \.\. 4294967295: ")


def test_choices_are_listed_and_the_nearest_is_suggested():
    for name, choices in CHOICES.items():
        listed = choices.replace(" ", ", ")
        refused(name, "zzz", rf"^config: {name}='zzz' is not one of {listed}\.$")
        refused(name, choices.split()[-1][:-1], rf"^config: {name}='\w+' is not one of {listed}; did you mean \w+\?$")
        for value in choices.split():
            config.resolve(made(**NEEDS.get(value, {}), **{name.replace(".", "__"): value}))


# ---- the command line's texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "7", 7), ("steps", "1e4", 10000), ("steps", "2E3", 2000), ("steps", "+7", 7), ("mesh.data", "-1", -1),
        ("seed", "4294967295", 4294967295), ("optim.learning_rate", "3e-4", 3e-4), ("optim.learning_rate", "1", 1.0),
        ("optim.learning_rate", ".5", 0.5), ("optim.warmup_steps", "1e2", 100), ("data.shuffle", "false", False),
        ("data.shuffle", "False", False), ("data.shuffle", "0", False), ("data.shuffle", "true", True),
        ("data.skip_non_utf8", "TRUE", True), ("data.skip_non_utf8", "1", True), ("data.paths", "a.txt", ("a.txt",)),
        ("data.paths", "a b,/c/**/*.txt", ("a b", "/c/**/*.txt")), ("data.paths", "a,", ("a",)),
        ("sample.prompt", "a,b=1 ", "a,b=1 "), ("sample.prompt", "", ""), ("sample.prompt", "1e4", "1e4"),
        ("model.remat", "full", "full"), ("compile_cache", "", ""),
    ],
)  # fmt: skip
def test_an_override_is_parsed_by_the_keys_type(name, text, value):
    before = config.default()
    after = config.override(before, {name: text})
    assert config.flat(after)[name] == value
    assert type(config.flat(after)[name]) is type(value)
    assert before == config.default()
    changed = {key for key, now in config.flat(after).items() if now != KEYS[key].default}
    assert changed <= {name}


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("log_every_steps", text, "a whole number")
        for text in ("1.0", "1e-3", "1.5e3", "0x10", "inf", "nan", "", "ten", "1,000")
    ]
    + [("optim.learning_rate", text, "a number") for text in ("", "fast", "1e", "3-4")]
    + [("data.shuffle", text, "true or false") for text in ("yes", "", "2", "None")],
)
def test_an_override_that_is_no_value_of_the_type(name, text, kind):
    with pytest.raises(ConfigError, match=rf"^config: {name}='{text}' is not {kind}: {KEYS[name].help}\.$"):
        config.override(config.default(), {name: text})


def test_large_whole_numbers_are_not_rounded_through_floats():
    assert config.override(config.default(), {"seed": "9007199254740993"}).seed == 9007199254740993


UNKNOWN = [
    ("optim.learning_rat", r"did you mean optim\.learning_rate\?"),
    ("learning_rate", r"did you mean optim\.learning_rate\?"),
    ("mesh.fdsp", r"did you mean mesh\.fsdp\?"), ("stepz", r"did you mean steps\?"),
    ("model.learning_rate", r"did you mean optim\.learning_rate\?"), ("zzz", r"jaxtrain config show"),
    ("foo.bar.baz", r"jaxtrain config show"), ("mesh.zzzzzzzz", r"mesh\.slice, mesh\.data, mesh\.fsdp, mesh\.tensor"),
    ("optim.b1.x", r"did you mean optim\.b1\?"), ("optim", r"optim\."), ("", r"jaxtrain config show"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hint"), UNKNOWN)
def test_an_unknown_key_gets_a_hint(name, hint):
    for act in (
        lambda: config.override(config.default(), {name: "1"}),
        lambda: config.assign(config.default(), name, 1),
    ):
        with pytest.raises(ConfigError, match=rf"^config: unknown key {name}; .*{hint}"):
            act()


# ---- the whole ---------------------------------------------------------------------------------------------------


def test_flat_assign_and_default_fit_together():
    c = config.default()
    for name, value in config.flat(c).items():
        config.assign(c, name, value)
    assert c == config.default()
    config.assign(c, "optim.b1", 0.5)
    assert (c.optim.b1, config.flat(c)["optim.b1"], config.default().optim.b1) == (0.5, 0.5, 0.9)
    assert config.flat({"a": {"b": {"c": 1}}, "d": ConfigDict({"e": ()})}) == {"a.b.c": 1, "d.e": ()}


@pytest.mark.parametrize("make", [config.default, lambda: config.resolve(config.default())])
def test_a_typo_on_a_config_is_an_error(make):
    c = make()
    for node, name in ((c, "step"), (c.optim, "learning_rat"), (c.mesh, "tensors")):
        with pytest.raises(AttributeError, match=r"Did you mean|does not exist"):
            setattr(node, name, 1)
    with pytest.raises(TypeError, match="every_steps"):
        c.eval.every_steps = "many"
    with pytest.raises(TypeError, match="shuffle"):
        c.data.shuffle = "no"


def test_resolve_fills_in_the_horizon_and_leaves_its_argument_alone():
    c = made(steps=50)
    r = config.resolve(c)
    assert (r.optim.schedule_steps, c.optim.schedule_steps) == (50, 0)
    assert config.resolve(r) == r
    assert config.resolve(made(steps=50, optim__schedule_steps=80)).optim.schedule_steps == 80
    assert config.resolve(made(steps=50, optim__schedule="constant")).optim.schedule_steps == 0


def test_resolve_wants_every_key_and_no_other():
    c = config.default().unlock()
    del c.optim.b1, c.steps
    with pytest.raises(ConfigError, match=r"steps, optim\.b1 missing; start from jaxtrain\.config\.default\(\)"):
        config.resolve(c)
    c = config.default().unlock()
    c.optim.beta1 = 0.9
    with pytest.raises(ConfigError, match=r"unknown key optim\.beta1; did you mean optim\.b"):
        config.resolve(c)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"data__sequence_length": 512}, r"data\.sequence_length=512 .*model\.max_length=256.*shorten"),
        ({"steps": 10, "optim__warmup_steps": 10}, r"optim\.warmup_steps=10 .*less than the horizon of 10"),
        ({"steps": 100, "optim__warmup_steps": 10, "optim__schedule_steps": 10}, r"warmup_steps=10 .*horizon of 10"),
        ({"steps": 11, "optim__schedule_steps": 10}, r"schedule_steps=10 .*steps=11; raise .*end_learning_rate"),
        ({"mesh__data": 0}, r"mesh\.data=0.*1 or more"),
        ({"mesh__data": -1}, r"mesh\.data=-1.*mesh\.fsdp=-1.*at most one"),
    ],
)
def test_keys_that_do_not_fit_together(values, match):
    with pytest.raises(ConfigError, match=match):
        config.resolve(made(**values))


def test_keys_that_just_fit_together():
    config.resolve(made(data__sequence_length=256, model__max_length=256))
    config.resolve(made(steps=11, optim__warmup_steps=10))
    config.resolve(made(steps=11, optim__schedule_steps=10, optim__end_learning_rate=1e-5))
    config.resolve(made(steps=11, optim__schedule="constant"))
    config.resolve(made(mesh__data=-1, mesh__fsdp=1))


def test_drift_lists_every_key_of_the_experiment_and_no_free_one():
    old = config.default()
    for name, key in KEYS.items():
        other = {bool: lambda v: not v, str: lambda v: v + "x", tuple: lambda v: (*v, "x")}.get(
            type(key.default), lambda v: v + 1
        )(key.default)
        new = made(**{name.replace(".", "__"): other})
        assert config.drift(old, new) == ([] if key.free else [f"{name}: {key.default} -> {other}"])
        assert config.drift(new, old) == ([] if key.free else [f"{name}: {other} -> {key.default}"])
        assert config.drift(new, new) == []
    assert config.drift(old, made(optim__b1=0.8, steps=5, seed=1, mesh__data=3)) == [
        "seed: 0 -> 1",
        "optim.b1: 0.9 -> 0.8",
    ]


def test_drift_reads_json_and_configs_of_before_a_key_was_added():
    json_like = config.default().to_dict() | {"data": {**config.default().data.to_dict(), "paths": ["stdlib"]}}
    del json_like["optim"]["ema"]
    assert config.drift(json_like, config.default()) == config.drift(config.default(), json_like) == []
    assert config.drift(json_like, made(optim__ema=0.9)) == ["optim.ema: 0.0 -> 0.9"]


# ---- a file with mistakes ----------------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path: pathlib.Path):
    def load(*lines: str, source: str | None = None, **overrides: str) -> ConfigDict:
        text = ["from jaxtrain import config", "def get_config(arg=''):", "    c = config.default()"]
        text += [f"    {line}" for line in (*lines, "return c")]
        (tmp_path / "mine.py").write_text("\n".join(text) if source is None else source)
        return cli.load_config(str(tmp_path / "mine.py"), {k.replace("__", "."): v for k, v in overrides.items()})

    return load


def test_a_good_file_with_an_argument_and_overrides(load, tmp_path):
    c = load(
        "c.optim.b1 = 0.5", "c.optim.learning_rate = 1", "c.data.paths = [arg or 'x']", optim__b2="0.7", steps="1e2"
    )
    assert (c.optim.b1, c.optim.b2, c.optim.learning_rate, c.data.paths, c.steps) == (0.5, 0.7, 1.0, ("x",), 100)
    assert c.optim.schedule_steps == 100
    assert cli.load_config(f"{tmp_path}/mine.py:/data/*.txt", {}).data.paths == ("/data/*.txt",)
    assert cli.load_config(None, {"steps": "3"}).steps == 3


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("c.optim.learning_rat = 1e-3", r"line 4: c\.optim\.learning_rat = 1e-3: .* Did you mean \"learning_rate\""),
        ("c.optmi.b1 = 0.5", r"line 4: c\.optmi\.b1 = 0\.5: .*optmi.* Did you mean \"optim\""),
        ("c.log_every_steps = 1.5", r"line 4: c\.log_every_steps = 1\.5: .*steps.*float.*int"),
        ("c.steps = 1.5", r"steps=1\.5 is float, not a whole number"),
        ("c.steps = '5'", r"steps='5' is not a number or a length: write"),
        ("c.data.paths = 'x'", r"line 4: .*paths.*str.*tuple"),
        ("c.data.paths = ('x', 3)", r"data\.paths=\('x', 3\) is .*list of texts"),
        ("c.model = 3", r"line 4: c\.model = 3: .*model"),
        ("del c.model", r"line 4: del c\.model: "),
        ("c.model.remat = None", r"model\.remat=None is NoneType, not a text"),
        ("c.steps = True", r"steps=True is bool, not a whole number"),
        ("c.unlock(); c.foo = 3", r"unknown key foo"),
        ("c.optim.momentum = 2.0", r"optim\.momentum=2\.0 is outside 0 \.\. 0\.999999"),
        ("c.steps = 0", r"steps=0 is outside 1 \.\. 2147483647"),
        ("return None", r"mine\.py.*get_config.*NoneType"),
        ("return {}", r"mine\.py.*get_config.*dict"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_a_sentence(load, line, match):
    with pytest.raises(ConfigError, match=match) as caught:
        load(line)
    text = str(caught.value)
    assert text.startswith("config: ")
    assert "Other fields" not in text
    assert "\\'" not in text
    assert text.count("Did you mean") <= 1


def test_a_get_config_without_an_argument_and_a_file_without_one(load):
    with pytest.raises(ConfigError, match=r"^config: \S+mine\.py has no get_config\(arg\)\.$"):
        load(source="x = 1\n")
    with pytest.raises(ConfigError, match=r"^config: \S+mine\.py: .*get_config\(\) takes 0 positional"):
        load(source="def get_config():\n    return 1\n")


def test_a_mistake_in_a_helper_file_names_the_line_of_the_config(load):
    source = "def get_config(arg):\n    from jaxtrain import config\n    config.default().step\n"
    with pytest.raises(ConfigError, match=r"mine\.py, line 3: config\.default\(\)\.step: "):
        load(source=source)


def test_a_file_that_is_not_there_suggests_its_neighbours(load, tmp_path):
    load()
    with pytest.raises(ConfigError, match=r"^config: \S+/min\.py is no file; there is \S+/mine\.py\.$"):
        cli.load_config(str(tmp_path / "min.py"), {})
    with pytest.raises(ConfigError, match=r"^config: /nowhere/x\.py is no file\.$"):
        cli.load_config("/nowhere/x.py", {})


def test_overrides_win_over_the_file_and_are_checked_after_it(load):
    assert load("c.steps = 5", steps="7").steps == 7
    with pytest.raises(ConfigError, match=r"unknown key stepz; did you mean steps\?"):
        load(stepz="7")
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps=9 must be less than the horizon of 7"):
        load("c.optim.warmup_steps = 9", steps="7")


# ---- lengths, batch-size warm-up, and what reads a key -------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.length])
def test_a_length_is_a_number_of_steps_or_a_text(name):
    wsd = {"optim__schedule": "warmup_stable_decay"}
    given = config.resolve(config.override(made(steps="9 epochs", **wsd), {name: "2 epochs"}))
    assert config.flat(given)[name] == "2 epochs"
    assert config.counts_epochs(given)
    for text in ("two epochs", "2", "2 weeks", "-1 epochs", "1e400 tokens", ""):
        refused(name, text, rf"^config: {name}='{text}' is not a number or a length: write '300', '2 epochs'")
    with pytest.raises(ConfigError, match=rf"^config: {name}='1.5' is not a number or a length"):
        config.override(config.default(), {name: "1.5"})


def test_lengths_become_steps():
    """Windows of 2 x 4 rows of 8 tokens, 100 rows an epoch: 64 tokens a window, 12.5 windows an epoch."""
    c = config.resolve(
        made(steps="4 epochs", optim__schedule="warmup_stable_decay", optim__warmup_steps="80 samples",
             optim__decay_steps="640 tokens")
    )  # fmt: skip
    batching = Batching(rows=4, k=2, weight_per_row=8, epoch_rows=100)
    got = config.in_steps(c, batching)
    assert (got.steps, got.optim.schedule_steps, got.optim.warmup_steps, got.optim.decay_steps) == (50, 50, 10, 10)
    assert config.in_steps(got, batching) == got
    assert not config.counts_epochs(got)
    warm = dataclasses.replace(batching, warmup=((10, 1),))  # 10 windows of 4 rows, then 8 rows each
    got = config.in_steps(c, warm)
    assert (got.steps, got.optim.warmup_steps, got.optim.decay_steps) == (10 + 45, 10 + 5, 10)
    with pytest.raises(ConfigError, match=r"^config: steps='4 epochs' needs the data to be counted"):
        config.in_steps(c, dataclasses.replace(batching, epoch_rows=None))
    with pytest.raises(ConfigError, match=r"^config: steps='4 samples' is 1 micro-batches of 4 rows, and a window tak"):
        config.in_steps(config.resolve(made(steps="4 samples")), batching)
    with pytest.raises(
        ConfigError, match=r"^config: optim\.warmup_steps=100 must be less than the horizon of 50 steps"
    ):
        config.in_steps(config.resolve(made(steps="4 epochs", optim__warmup_steps="8 epochs")), batching)


def test_batch_size_warm_up_is_stages_that_follow_one_another():
    c = config.resolve(config.override(made(accumulation__k=4), {"accumulation.warmup": "100:1,300:2"}))
    assert config.warmup_stages(c) == ((100, 1), (300, 2))
    assert config.warmup_stages(config.resolve(config.default())) == ()
    for text in ("100", "100:1:2", "a:1", "100:"):
        refused(
            "accumulation.warmup", (text,), r"^config: accumulation\.warmup=\S+ is no list of WINDOW:K; 100:1,300:2"
        )
    for stages in (
        ("300:1", "100:2"),
        ("100:1", "100:2"),
        ("0:1",),
        ("100:0",),
        ("-5:1",),
        ("100:1048577",),
        ("2147483648:1",),
    ):
        refused(
            "accumulation.warmup", stages, r"windows rise from stage to stage, up to 2147483647, and each takes 1 to"
        )
    c = made(accumulation__warmup=("100:1",), accumulation__mechanism="scan")
    with pytest.raises(ConfigError, match=r"accumulation\.warmup=100:1 needs accumulation\.mechanism=multisteps"):
        config.resolve(c)


def test_a_key_that_nothing_reads_is_refused():
    digits = {"data__name": "digits", "model__name": "resnet"}
    config.resolve(made(**digits, model__running_stats="pooled", model__stages=2))
    for name, value in {"model.heads": 8, "data.paths": ("a",), "loss.z": 0.1, "sample.tokens": 3}.items():
        with pytest.raises(
            ConfigError,
            match=rf"^config: {name}=.* would do nothing with (data|model)\.name=\w+, only with (transformer|text); ",
        ):
            config.resolve(made(**digits, **{name.replace(".", "__"): value}))
    refused(
        "model.stages",
        2,
        r"model\.stages=2 would do nothing with model\.name=transformer, only with resnet; leave it at 3\.$",
    )
    refused("data.name", "digits", r"model\.name=transformer does not read data\.name=digits; choose mlp or resnet\.$")
    for name, key in KEYS.items():
        assert {*key.of} <= {choice for at in config._CHOOSE for choice in KEYS[at].choices}, name
        assert len({at for at in config._CHOOSE if {*key.of} & {*KEYS[at].choices}}) == bool(key.of), name
    refused(
        "optim.momentum", 0.9, r"optim\.momentum=0\.9 would do nothing with optim\.name=adamw, only with sgd and muon"
    )
    refused("precision.loss_scale", 8.0, r"would do nothing with precision\.compute=bfloat16, only with float16; leave")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"checkpoint__auto": True, "checkpoint__every_s": 60.0},
      "checkpoint.auto chooses the interval, and checkpoint.every_s=60 fixes it; leave one out."),
     ({"checkpoint__failures_per_day": 2.0},
      "checkpoint.failures_per_day=2 would do nothing without checkpoint.auto=true.")],
)  # fmt: skip
def test_a_cadence_that_contradicts_itself_is_refused(changes, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config.resolve(made(**changes))
