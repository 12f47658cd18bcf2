"""Compose file, Dockerfile, units and manifests: valid by their own schemas, and as safe as the documents say."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from fedstill.cli import app
from fedstill.common.config.files import load_run, load_site

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
SITES = ("north", "east", "south")


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "docker" / name).read_text()))


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_compose_files_fit_the_compose_specification(name: str) -> None:
    schema = json.loads(
        (resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text(encoding="utf-8")
    )
    jsonschema.validate(compose(name), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"services": {"north": {"helthcheck": {}}}}, schema)


def test_every_service_is_hardened_and_has_a_health_check() -> None:
    services = compose()["services"]
    assert set(services) == {"coordinator", *SITES}
    for name, service in services.items():
        assert service["user"] == "10001:10001", name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["healthcheck"]["test"][0] == "CMD", name


def test_sites_share_nothing_but_the_authority_and_no_network() -> None:
    made = compose()
    named = {
        name: {v.split(":")[0] for v in s["volumes"] if not v.startswith(".")} for name, s in made["services"].items()
    }
    for one in SITES:
        assert named[one] == {one, "authority"}
        assert f"{one}.toml" in " ".join(made["services"][one]["volumes"])
        assert made["services"][one]["networks"] == [one]
        assert "authority:/authority:ro" in made["services"][one]["volumes"]
        assert made["networks"][one] == {"internal": True}
    assert named["coordinator"] == {"coordinator", "authority"}
    assert set(made["volumes"]) == {"authority", "coordinator", *SITES}


def test_the_sites_files_and_the_run_are_valid_and_belong_together() -> None:
    run = load_run(DEPLOY / "docker/run.toml")
    assert [site.name for site in run.sites] == list(SITES)
    for name in SITES:
        site = load_site(DEPLOY / f"docker/{name}.toml")
        assert (site.name, site.superlink) == (name, "coordinator:9092")
        assert site.limits.leave == ["predictions"]


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "hadolint").exists(), reason="hadolint is installed by make setup"
)
def test_the_dockerfile_passes_its_linter_and_ends_as_nobody_special() -> None:
    path = DEPLOY / "docker/Dockerfile"
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    images = [line.split()[1] for line in lines if line.startswith("FROM") and "python" in line]
    assert images
    assert all(":" in image and not image.endswith("latest") for image in images)


@pytest.mark.parametrize("name", ["coordinator.sh", "site.sh"])
def test_start_scripts_are_valid_shell(name: str) -> None:
    subprocess.run(["sh", "-n", DEPLOY / "docker" / name], check=True)


@pytest.mark.parametrize("name", ["fedstill-superlink", "fedstill-site"])
def test_units_start_commands_that_exist_as_a_user_of_their_own(name: str) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / f"systemd/{name}.service")
    service = unit["Service"]
    assert service["User"] == "fedstill"
    assert (service["NoNewPrivileges"], service["ProtectSystem"]) == ("yes", "strict")
    scripts = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(service["ExecStart"].split()[0]).name in scripts
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", DEPLOY / f"systemd/{name}.service"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = [line for line in done.stderr.splitlines() if f"{name}.service" in line]
        assert all("is not executable" in line for line in said), said  # it is not installed here


@pytest.mark.parametrize("name", ["coordinator", "site"])
def test_manifests_fit_kubernetes_and_run_without_rights(name: str) -> None:
    parts = list(yaml.safe_load_all((DEPLOY / f"kubernetes/{name}.yaml").read_text()))
    for part in parts:
        kubernetes_validate.validate(part, "1.30", strict=True)
    [pod] = [part["spec"]["template"]["spec"] for part in parts if part["kind"] == "Deployment"]
    assert pod["securityContext"]["runAsNonRoot"]
    for container in pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["livenessProbe"]["grpc"] == {"port": 9110}


def test_the_manifests_site_file_is_valid(tmp_path: Path) -> None:
    parts = yaml.safe_load_all((DEPLOY / "kubernetes/site.yaml").read_text())
    [config] = [part for part in parts if part["kind"] == "ConfigMap"]
    (tmp_path / "site.toml").write_text(config["data"]["site.toml"])
    assert load_site(tmp_path / "site.toml").health == "0.0.0.0:9110"


def test_the_console_scripts_lead_to_functions() -> None:
    scripts = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["scripts"]
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_document_has_valid_files_and_commands_that_exist(tmp_path: Path) -> None:
    text = (DEPLOY.parent / "docs/tutorials/between-organisations.md").read_text()
    site, run = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "site.toml").write_text(site.replace("<64 hexadecimal digits>", "a" * 64))
    assert load_site(tmp_path / "site.toml").limits.mb_per_run == 200
    assert load_run(run).exchange.sites == 3
    commands = {tuple(line.split()[1:3]) for line in re.findall(r"^ *(fedstill .*)$", text, re.MULTILINE)}
    assert len(commands) >= 8
    for first, second in commands:
        group = get_command(app).commands[first]  # type: ignore[attr-defined]
        assert first not in ("keys", "certs") or second in group.commands
