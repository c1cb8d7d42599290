from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.config import config_keys, load_config
from kvstore.errors import ConfigError
from kvstore.units import Bytes, Nanos, seconds


class Rung(enum.StrEnum):
    INT8 = "int8"
    RAW = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    ttl: Nanos = seconds(10)
    """How long a lease
    lives."""
    renew_every: Nanos = seconds(3)

    def __post_init__(self) -> None:
        if self.renew_every * 3 > self.ttl:
            raise ConfigError("lease.renew_every must be at most a third of lease.ttl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    node_id: str
    port: int = 0
    weight: float = 1.0
    verbose: bool = False
    capacity: Bytes = Bytes(1 << 28)
    ssd_path: Path | None = None
    rung: Rung = Rung.INT8
    zones: tuple[str, ...] = ()
    tenants: dict[str, str] = field(default_factory=dict)
    lease: Lease = field(default_factory=Lease)


def load(tmp_path: Path, text: str | None = None, *, flags: dict[str, str] | None = None, env: dict[str, str] | None = None) -> Config:
    file = None
    if text is not None:
        file = tmp_path / "node.toml"
        file.write_text(text)
    return load_config(Config, file=file, flags={"node_id": "a", **(flags or {})}, env=env or {})


def test_every_type_is_read_from_a_file(tmp_path: Path) -> None:
    text = 'port = 7\nweight = 2\nverbose = true\ncapacity = "1MiB"\nssd_path = "/x"\nrung = "raw"\nzones = ["a", "b"]\n'
    config = load(tmp_path, text + '[tenants]\nkey = "shop"\n[lease]\nttl = "1min"\nrenew_every = 0.5\n')
    assert (config.port, config.weight, config.verbose, config.capacity) == (7, 2.0, True, 1 << 20)
    assert (config.ssd_path, config.rung, config.zones, config.tenants) == (Path("/x"), Rung.RAW, ("a", "b"), {"key": "shop"})
    assert (config.lease.ttl, config.lease.renew_every) == (seconds(60), seconds(0.5))


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    text = "port = 1\nweight = 1.5\n[lease]\nttl = 20\n"
    config = load(tmp_path, text, env={"LARDER_PORT": "2", "LARDER_LEASE_TTL": "30s"}, flags={"port": "3"})
    assert (config.port, config.weight, config.lease.ttl) == (3, 1.5, seconds(30))


def test_every_type_is_read_from_text(tmp_path: Path) -> None:
    env = {"LARDER_TENANTS": "k=v,x=y", "LARDER_ZONES": "a, b", "LARDER_SSD_PATH": "none", "LARDER_VERBOSE": "on"}
    config = load(tmp_path, env=env)
    assert config.tenants == {"k": "v", "x": "y"}
    assert (config.zones, config.ssd_path, config.verbose) == (("a", "b"), None, True)


def test_an_unknown_key_is_refused_with_the_known_ones_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key prot is not known; did you mean 'port'\? \(known: capacity, lease.renew_every, .*zones\)"):
        load(tmp_path, "prot = 1\n")
    with pytest.raises(ConfigError, match=r"key lease.tll is not known; did you mean 'lease.ttl'"):
        load(tmp_path, "[lease]\ntll = 1\n")
    with pytest.raises(ConfigError, match="flag --prot is not known"):
        load(tmp_path, flags={"prot": "1"})


def test_bad_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.toml is not valid TOML: .*line 2"):
        load(tmp_path, "port = 1\nweight = = 2\n")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*absent\.toml: No such file"):
        load_config(Config, file=tmp_path / "absent.toml", flags={}, env={})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = true", "port: True is not a whole number"),
        ("port = 1.5", "port: 1.5 is not a whole number"),
        ('port = "x"', "port: 'x' is not a whole number"),
        ('weight = "x"', "weight: 'x' is not a number"),
        ("verbose = 1", "verbose: 1 is not true or false"),
        ('capacity = "lots"', "capacity: 'lots' is not a size"),
        ("capacity = true", "capacity: True is not a size"),
        ('rung = "int3"', "rung: 'int3' is not one of int8, raw"),
        ("zones = 1", "zones: 1 is not a list"),
        ("node_id = 1", "node_id: 1 is not text in quotes"),
        ("lease = 1", "key lease is not known"),
        ("[lease]\nttl = 1", "at most a third"),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_be_right(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load(tmp_path, text)


def test_a_key_without_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match="node_id must be given: in the config file, as --node_id or as LARDER_NODE_ID"):
        load_config(Config, file=None, flags={}, env={})


def test_the_help_text_of_a_key_is_the_literal_below_it() -> None:
    keys = {key.name: key for key in config_keys(Config)}
    assert keys["lease.ttl"].help == "How long a lease lives."
    assert keys["lease.ttl"].env_name == "LARDER_LEASE_TTL"
    assert keys["port"].help == ""
