"""Options: five ways in, one validation, messages that name the option."""

import argparse
import os

import pytest

from libraspec_sglang import options


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for field in options.Options.model_fields:
        monkeypatch.delenv(options.env_name(field), raising=False)
    monkeypatch.setattr("os.environ", __import__("os").environ)


def parse(*argv):
    parser = argparse.ArgumentParser()
    options.add_cli_flags(parser)
    options.add_cli_flags(parser)  # SGLang builds its parser more than once
    return parser.parse_args(argv)


def test_defaults_are_the_papers():
    loaded = options.load({})
    assert (loaded.policy, loaded.alpha, loaded.max_length) == ("auto", 2.2, None)


def test_flags_become_environment(monkeypatch):
    monkeypatch.setenv("LIBRASPEC_ALPHA", "1.7")
    options.take_cli_flags(parse("--libraspec-max-length", "12"))
    assert options.load().max_length == 12
    assert options.load().alpha == 1.7
    options.configure(max_length=None)
    assert options.load().max_length is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "1", "--libraspec-alhpa", "2"], ["--libraspec-alhpa", "--libraspec-alpha"]),
        (["--libraspec-alhpa=2"], ["--libraspec-alhpa", "--libraspec-alpha"]),
        (["--libraspec-alpha", "0"], ["--libraspec-alpha", "greater than 0"]),
        (["--libraspec-policy", "fast"], ["--libraspec-policy", "libra"]),
        (["--libraspec-policy"], ["--libraspec-policy", "argument"]),
    ],
)
def test_a_command_line_is_checked_before_anything_is_imported(argv, words):
    with pytest.raises(options.OptionError) as error:
        options.check_cli_flags(argv)
    assert all(word in str(error.value) for word in words), error.value


def test_a_right_command_line_passes_and_sets_nothing():
    options.check_cli_flags(["--tp", "2", "--libraspec-alpha", "1.5", "--libraspec-pol", "libra"])
    assert "LIBRASPEC_ALPHA" not in os.environ


def test_every_option_has_a_flag_and_help():
    parser = argparse.ArgumentParser()
    options.add_cli_flags(parser)
    text = parser.format_help()
    for field in options.Options.model_fields:
        assert options.flag_name(field) in text


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("alpha", "0"),
        ("alpha", "-1"),
        ("alpha", "nan"),
        ("alpha", "1e300"),
        ("alpha", "x"),
        ("max-length", "0"),
        ("max-length", "1000"),
        ("static-length", "-1"),
    ],
)
def test_out_of_range_names_the_flag(flag, value):
    with pytest.raises(options.OptionError, match=f"--libraspec-{flag} .or LIBRASPEC_"):
        options.take_cli_flags(parse(f"--libraspec-{flag}", value))
    assert options.load() == options.load({})  # nothing stuck


def test_unknown_choice_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        parse("--libraspec-policy", "best")
    assert "--libraspec-policy" in capsys.readouterr().err


def test_configure_rejects_unknown_names():
    with pytest.raises(options.OptionError, match=r"unknown LibraSpec option.* alfa"):
        options.configure(alfa=2.0)


def test_bad_environment_names_the_variable():
    with pytest.raises(options.OptionError, match="LIBRASPEC_POLICY"):
        options.load({"LIBRASPEC_POLICY": "best"})


def test_a_misspelt_variable_is_found():
    with pytest.raises(options.OptionError, match=r"LIBRASPEC_ALHPA is not.*mean LIBRASPEC_ALPHA"):
        options.load({"LIBRASPEC_ALHPA": "2"})
    assert options.load({"LIBRASPEC_CPU": "1", "LIBRASPEC_CACHE": "x", "OTHER": "y"}).alpha == 2.2


def test_configure_refuses_what_an_environment_cannot_hold():
    with pytest.raises(options.OptionError, match=r"trace = .*NUL"):
        options.configure(trace="a\0b")


def test_a_message_is_short_whatever_was_given():
    with pytest.raises(options.OptionError) as caught:
        options.request_options({"libraspec_max_length": "x" * 200_000})
    assert len(str(caught.value)) < 300


def test_request_options():
    own = options.request_options(
        {"libraspec_alpha": 3, "libraspec_max_length": 0, "other": object()}
    )
    assert (own.alpha, own.max_length) == (3.0, 0)
    assert options.request_options(None).alpha is None
    assert options.request_options({"thinking_budget": 5}).max_length is None


@pytest.mark.parametrize(
    "params",
    [
        {"libraspec_alpha": 0},
        {"libraspec_max_length": -1},
        {"libraspec_alhpa": 1},
        {"libraspec_alpha": "much"},
    ],
)
def test_bad_request_options_name_the_key(params):
    with pytest.raises(options.OptionError, match=r"custom_params\['libraspec_"):
        options.request_options(params)
