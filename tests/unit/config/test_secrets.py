import pytest

from miles.config.flags import with_values
from miles.config.rules import rule_violations
from miles.config.secrets import Secrets
from miles.config.sections import RunConfig

ENVIRONMENT = {
    "WANDB_API_KEY": "0123456789abcdef",
    "MY_PASSWORD": "correct horse",
    "SHORT_TOKEN": "abc",
    "HOME": "/root",
}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("login with 0123456789abcdef now", "login with *** now"),
        ("correct horse battery", "*** battery"),
        ("https://user:pa55@host:80/x and http://host/a:b@c", "https://***@host:80/x and http://host/a:b@c"),
        ("Authorization: Bearer hf_ABCDEFGHabcdefgh1234", "Authorization: Bearer ***"),
        ("key sk-proj-0123456789abcdefgh", "key ***"),
        ("abc, /root, hf_checkpoint: model, sk-learn", "abc, /root, hf_checkpoint: model, sk-learn"),
        ("https://user:$NAME@host", "https://user:$NAME@host"),
    ],
)
def test_hide(text, hidden):
    secrets = Secrets(ENVIRONMENT)
    assert secrets.hide(text) == hidden
    assert secrets.are_in(text) == (text != hidden)


def test_a_secret_in_a_setting_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def problems(**values):
        return [text for text in rule_violations(with_values(RunConfig(), values)) if "password or a key" in text]

    (problem,) = problems(rm_url="https://user:pa55@host/score")
    assert problem.startswith("--rm-url carries") and "pa55" not in problem
    assert problems(apply_chat_template_kwargs={"key": "0123456789abcdef"})
    assert problems(rollout_stop=("x", "hf_ABCDEFGHabcdefgh1234"))
    assert not problems(rm_url="https://user:$NAME@host/score")


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "", "a\\b", "a\0b", "a\nb"])
def test_a_run_name_stays_in_its_folder(name):
    violations = rule_violations(with_values(RunConfig(), {"run_name": name}))
    assert any("--run-name" in text for text in violations)
    assert not any("--run-name" in text for text in rule_violations(with_values(RunConfig(), {"run_name": "a-1 b.c"})))
