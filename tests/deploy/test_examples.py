"""What deploy/ shows is what the processes take."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from decode_node.config import DecodeConfig
from decode_node.gateway.config import GatewayConfig
from kvstore.config import config_keys, load_config
from kvstore.config_help import example_toml
from kvstore.node.config import NodeConfig
from prefill_node.config import PrefillConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLES: dict[str, tuple[type[Any], str]] = {
    "store-node.toml": (NodeConfig, "kvstore.node"),
    "prefill-node.toml": (PrefillConfig, "prefill_node"),
    "decode-node.toml": (DecodeConfig, "decode_node"),
    "gateway.toml": (GatewayConfig, "decode_node.gateway"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_lists_every_key_at_its_default(name: str) -> None:
    cls, program = EXAMPLES[name]
    assert (DEPLOY / "config" / name).read_text() == example_toml(cls, program=program), "run `make examples`"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_loads_as_it_is_and_with_every_key_switched_on(name: str, tmp_path: Path) -> None:
    cls, _ = EXAMPLES[name]
    file = DEPLOY / "config" / name
    defaults = load_config(cls, file=None, flags={}, env={})
    assert load_config(cls, file=file, flags={}, env={}) == defaults
    switched_on = tmp_path / name
    switched_on.write_text(re.sub(r"^#(?=\w+ = )", "", file.read_text(), flags=re.MULTILINE))
    assert load_config(cls, file=switched_on, flags={}, env={}) == defaults


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_key_of_a_process_says_what_it_is_for(name: str) -> None:
    cls, _ = EXAMPLES[name]
    assert [key.name for key in config_keys(cls) if not key.help] == []


def test_the_dashboard_draws_only_metrics_that_the_code_has() -> None:
    code = "\n".join(path.read_text() for package in ("kvstore", "prefill_node", "decode_node") for path in (ROOT / package).rglob("*.py"))
    known = {name.removesuffix("_total") for name in re.findall(r'"(larder_[a-z_]+)"', code)}
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    drawn = {
        re.sub(r"_(total|bucket|sum|count)$", "", name)
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"larder_[a-z_]+", target["expr"])
    }
    assert drawn
    assert drawn <= known, sorted(drawn - known)


def test_the_flags_and_variables_of_compose_and_kubernetes_are_known() -> None:
    keys = {key.name: key for cls, _ in EXAMPLES.values() for key in config_keys(cls)}
    variables = {key.env_name for key in keys.values()}
    for file in (DEPLOY / "docker-compose.yml", DEPLOY / "k8s" / "larder.yaml", DEPLOY / "Dockerfile"):
        text = file.read_text()
        assert set(re.findall(r"\bLARDER_[A-Z_]+", text)) <= variables, file
        assert set(re.findall(r'"--([a-z_.]+)=', text)) - {"save", "appendonly"} <= set(keys), file


def test_pinned_versions_cover_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(item for name in ("engine", "embedded-redis", "dev") for item in project["optional-dependencies"][name]),
    ]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    names = {re.split(r"[<>=\[]", item)[0].strip().lower().replace("_", "-") for item in asked}
    assert names <= pinned, sorted(names - pinned)
