"""The folder of what is kept between starts: named, in the user's cache, or none."""

from pathlib import Path

import pytest

from megatron_async.cache_folders import VARIABLE, cache_folder
from megatron_async.version import __version__


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/megatron_async"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/megatron_async"),
        ({}, "/home/me/.cache/megatron_async"),
        ({VARIABLE: "/named", "XDG_CACHE_HOME": "/x"}, "/named"),
        ({VARIABLE: "~/own"}, "/home/me/own"),
        ({VARIABLE: "here"}, str(Path.cwd() / "here")),
        ({VARIABLE: "."}, str(Path.cwd())),
        ({VARIABLE: ""}, "/home/me/.cache/megatron_async"),
    ],
)
def test_the_folder_is_by_environment_version_and_kind(monkeypatch, environment, expected):
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder("choices") == Path(expected) / __version__ / "choices"


def test_a_user_without_a_home_is_told_the_variable(monkeypatch):
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(OSError, match=VARIABLE):
        cache_folder("kernels")


def test_a_home_of_nobody_is_told(monkeypatch):
    monkeypatch.setenv(VARIABLE, "~nobody-has-this-name/cache")
    with pytest.raises(OSError, match="~nobody-has-this-name/cache: there is no such home"):
        cache_folder("kernels")
