import pytest

from lmforge.config.parse import read_command, read_words


def value(tree, token, multirun=False):
    problems = []
    words = read_words([token], tree, multirun, problems)
    assert not problems
    return list(words[0].values) if multirun else words[0].value


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("prompt=def f(a, b):", "def f(a, b):"),
        ("prompt=Hello, world", "Hello, world"),
        ('prompt=print("hi")', 'print("hi")'),
        ('prompt="hi" and "ho"', '"hi" and "ho"'),
        ("prompt='quoted'", "quoted"),
        ("prompt=${oc.env:HOME}", "${oc.env:HOME}"),
        ("prompt=back\\n", "back\\n"),
        ("prompt=null", "null"),
        ("stop=null", None),
        ("ckpt=epoch=1-step=20.ckpt", "epoch=1-step=20.ckpt"),
        ("ckpt=epoch\\=1-step\\=20.ckpt", "epoch=1-step=20.ckpt"),
        ('ckpt="epoch=1-step=20.ckpt"', "epoch=1-step=20.ckpt"),
        ("data.path=my file, [v1] {x}.txt", "my file, [v1] {x}.txt"),
        ("resume=auto", "auto"),
        ("trainer.devices=0,1", [0, 1]),
        ("trainer.devices=[0,1]", [0, 1]),
        ("trainer.devices=2", 2),
        ("optimizer.betas=0.9,0.99", [0.9, 0.99]),
        ("optimizer.lr=1e-4", 0.0001),
        ("name=1e3", "1e3"),
        ("+optimizer.lr=1", 1),
    ],
)
def test_plainly_typed_values(tree, token, meant):
    assert value(tree, token) == meant


def test_home_is_followed(tree, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert value(tree, "data.path=~/text") == "/somewhere/text"


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("optimizer.lr=1e-3,3e-4", [0.001, 0.0003]),
        ("strategy=ddp,fsdp", ["ddp", "fsdp"]),
        ("seed=range(0,3)", [0, 1, 2]),
        ("trainer.devices=1,2", [1, 2]),
        ("optimizer.betas=0.9,0.99", [[0.9, 0.99]]),
        ("optimizer.betas=[0.9,0.95],[0.8,0.9]", [[0.9, 0.95], [0.8, 0.9]]),
        ("prompt=a, b", ["a, b"]),
        ("prompt=choice('a, b','c')", ["a, b", "c"]),
        ("compile.backend=null,eager", [None, "eager"]),
        ("compile.backend=choice(null,eager)", [None, "eager"]),
        ("trainer.gradient_clip_val=choice(null,1.0)", [None, 1.0]),
        ("name=a,b", ["a", "b"]),
    ],
)
def test_sweeps(tree, token, meant):
    assert value(tree, token, multirun=True) == meant


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("strategy=fspd", "did you mean fsdp?; choices: 3d, auto, "),
        ("strategy=ddp,fsdp", "add -m"),
        ("compile=true", "choices: aot_eager, eager, inductor, off"),
        ("optimizer.lr=1e-3,3e-4", "add -m"),
        ("optimizer.lr=[", "cannot be read; allowed: a number above 0"),
        ("strategy", "has no value; write strategy=3d|auto|"),
        ("fast", "not of the form key=value"),
        ("hydra.run.dir=x", "Hydra's own settings are fixed"),
    ],
)
def test_problems_name_the_way_out(tree, token, said):
    problems = []
    assert read_words([token, "seed=1"], tree, False, problems)[-1].key == "seed"
    assert len(problems) == 1
    assert said in problems[0]


def test_a_list_of_texts_that_cannot_be_read_is_no_text(tree):
    read_words(["prompt=choice(def f(a, b):,x)"], tree, True, problems := [])
    assert "quote each one" in problems[0]


def test_flags():
    command = read_command(["seed=1", "--cfg", "job", "--resolve", "-m", "--info=defaults-tree"])
    assert (command.cfg, command.resolve, command.multirun, command.info) == (True, True, True, "defaults-tree")
    assert command.words == ["seed=1"]
    assert not command.problems
    assert "did you mean --resolve" in read_command(["--reslove"]).problems[0]
    assert "--cfg job" in read_command(["--cfg", "hydra"]).problems[0]
