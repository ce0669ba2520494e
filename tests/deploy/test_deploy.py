"""What `deploy/` has is taken by the tools that read it, and by the commands that it starts."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from configparser import RawConfigParser
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import kubernetes_validate
import pytest
import yaml

from kvist.cli import route, serve
from kvist.events.transports import Endpoint
from kvist.publisher.engine_config import engine_endpoints
from kvist.router.config import RouterConfig
from kvist.router.sources import SourceUrl

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
IMAGE = (DEPLOY / "Dockerfile").read_text()
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KUBERNETES_VERSIONS = ("1.30", "1.37")
"""The first one that has all that is used, and the newest."""

Objects = Mapping[tuple[str, str], Any]


def output_of(tool: str, *arguments: str | Path) -> str:
    done = subprocess.run([BIN / tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def parsed(command: list[str]) -> argparse.Namespace:
    """Return what the parser of `kvist COMMAND` makes of its arguments."""
    name, *arguments = command
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"kvist.cli.{name}").add_arguments(parser)
    return parser.parse_args(arguments)


# The image


def instruction(name: str) -> list[str]:
    """Return what the last such instruction of the image says, in JSON."""
    flattened = IMAGE.replace("\\\n", " ")
    return json.loads(re.findall(rf"{name}\b[^\[\n]*(\[.*\])", flattened)[-1])


def test_hadolint_has_nothing_to_say_of_the_image() -> None:
    assert output_of("hadolint", DEPLOY / "Dockerfile") == ""


def test_the_image_is_built_from_files_that_docker_is_shown_and_extras_that_there_are() -> None:
    shown = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", IMAGE, re.M) for name in line.split()]
    assert sorted(copied) == sorted(shown)
    assert all((ROOT / name).exists() for name in copied)
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", IMAGE, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*extras.split(","), "engine"} <= project["optional-dependencies"].keys()


def test_machine_code_is_looked_for_where_the_image_was_built_with_it() -> None:
    build, final = re.findall(r"^ENV (.*?[^\\])$", IMAGE, re.M | re.S)
    assert build == final


# Kubernetes


@pytest.fixture(scope="module")
def fleet() -> Objects:
    """Return all objects of the whole fleet, by kind and name, without the hashes that names of settings end in."""
    rendered = yaml.safe_load_all(output_of("kubectl", "kustomize", DEPLOY / "kubernetes" / "fleet"))
    return {(each["kind"], re.sub(r"-[a-z0-9]{10}$", "", each["metadata"]["name"])): each for each in rendered}


PODS = (("StatefulSet", "kvist-router"), ("Deployment", "nats"), ("Deployment", "vllm"))


def pod_of(fleet: Objects, name: str) -> Any:
    (found,) = (fleet[each]["spec"]["template"]["spec"] for each in PODS if each[1] == name)
    return found


def containers_of(fleet: Objects, name: str) -> dict[str, Any]:
    pod = pod_of(fleet, name)
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


def command_of(container: Any, objects: Objects) -> list[str]:
    """Return what a container runs, with its variables put in as Kubernetes does."""
    maps = [each["configMapRef"]["name"] for each in container.get("envFrom", []) if "configMapRef" in each]
    variables = {k: v for each in objects.values() if each["metadata"]["name"] in maps for k, v in each["data"].items()}
    words = [*container.get("command", []), *container.get("args", [])]
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]


@pytest.fixture
def router_command(fleet: Objects, tmp_path: Path) -> list[str]:
    """Return the routers' command, with settings and keys in a folder of this machine."""
    text = fleet["ConfigMap", "kvist-router"]["data"]["router.toml"]
    (tmp_path / "router.toml").write_text(text.replace("/run/secrets/kvist", str(tmp_path)))
    for name in ("api-key", "admin-key"):
        (tmp_path / name).write_text("secret")
    command = command_of(containers_of(fleet, "kvist-router")["router"], fleet)
    return [str(tmp_path / "router.toml") if word == "/etc/kvist/router.toml" else word for word in command]


@pytest.fixture
def router_config(router_command: list[str]) -> RouterConfig:
    return route.make_config(parsed(router_command))


@pytest.mark.parametrize("folder", ["base", "fleet"])
def test_every_object_is_as_the_schemas_of_kubernetes_say(folder: str) -> None:
    kinds = set()
    for each in yaml.safe_load_all(output_of("kubectl", "kustomize", DEPLOY / "kubernetes" / folder)):
        assert each["metadata"]["namespace"] == "kvist"
        kinds.add(each["kind"])
        is_of_kubernetes = not each["apiVersion"].startswith("monitoring.coreos.com/")
        for version in KUBERNETES_VERSIONS if is_of_kubernetes else ():
            kubernetes_validate.validate(each, version, strict=True)
    assert {"StatefulSet", "Service", "ServiceAccount", "Role", "RoleBinding", "PodDisruptionBudget"} <= kinds


@pytest.mark.parametrize("name", [name for _, name in PODS])
def test_all_but_the_engine_runs_as_the_restricted_standard_wants(fleet: Objects, name: str) -> None:
    pod = pod_of(fleet, name)["securityContext"]
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers_of(fleet, name).values():
        context = {**pod, **container["securityContext"]}
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        if container["name"] != "vllm":
            assert context["runAsNonRoot"]
            assert context["readOnlyRootFilesystem"]
        if container["image"].startswith("registry.example/kvist:"):
            assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in IMAGE


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_names_of_labels_volumes_and_ports_are_those_of_the_pods(fleet: Objects, kind: str, name: str) -> None:
    labels = fleet[kind, name]["spec"]["template"]["metadata"]["labels"]
    specs = {each: found["spec"] for (each, of), found in fleet.items() if of == name and "spec" in found}
    selectors = [spec.get("podSelector") or spec["selector"] for spec in specs.values()]
    assert all(selector.get("matchLabels", selector) == labels for selector in selectors)
    containers = containers_of(fleet, name).values()
    mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", [])}
    claimed = {each["metadata"]["name"] for each in specs[kind].get("volumeClaimTemplates", [])}
    assert mounted == {each["name"] for each in pod_of(fleet, name).get("volumes", [])} | claimed
    ports = {port["name"] for each in containers for port in each.get("ports", [])}
    used = [each["targetPort"] for each in specs["Service"]["ports"]]
    used += [each["port"] for rule in specs.get("NetworkPolicy", {}).get("ingress", []) for each in rule["ports"]]
    used += [each["port"] for each in specs.get("PodMonitor", {}).get("podMetricsEndpoints", [])]
    used += [each[probe]["httpGet"]["port"] for each in containers for probe in each if probe.endswith("Probe")]
    assert {*used} == ports


def test_the_router_follows_the_sidecars_of_the_pods_that_it_discovers(
    fleet: Objects, router_config: RouterConfig
) -> None:
    (url,) = (SourceUrl.parse(each) for each in router_config.discover)
    assert url.host == fleet["Service", "vllm"]["metadata"]["namespace"]
    assert url.path.strip("/") == "vllm"
    assert url.options["port"] in [each["name"] for each in fleet["Service", "vllm"]["spec"]["ports"]]
    allowed = {
        resource: rule["verbs"] for rule in fleet["Role", "kvist-discovery"]["rules"] for resource in rule["resources"]
    }
    assert allowed["endpointslices"] == ["get", "list", "watch"]
    engine, sidecar = (containers_of(fleet, "vllm")[name] for name in ("vllm", "publish"))
    args = parsed(command_of(sidecar, fleet))
    published = Endpoint.parse(args.to.replace("*", "pod"))
    assert Endpoint.parse(url.options["kv_event_source"].format(host="pod")) == published
    ports = [urlsplit(address or "").port for address in (published.address, published.replay_address)]
    assert [each["containerPort"] for each in sidecar["ports"]] == ports
    (followed,) = engine_endpoints(args.kv_events_config)
    assert followed.replay_address is not None
    assert args.kv_events_config in command_of(engine, fleet)  # the engine streams where the sidecar listens
    assert urlsplit(router_config.replicas or "").hostname == "nats"
    assert fleet["StatefulSet", "kvist-router"]["spec"]["replicas"] == 2


def test_pods_have_the_time_to_drain(fleet: Objects, router_config: RouterConfig) -> None:
    router, engine = (pod_of(fleet, name) for name in ("kvist-router", "vllm"))
    assert router["terminationGracePeriodSeconds"] > router_config.drain_delay_s + router_config.shutdown_timeout_s
    probe = containers_of(fleet, "kvist-router")["router"]["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < router_config.drain_delay_s
    slept_s = containers_of(fleet, "vllm")["vllm"]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert engine["terminationGracePeriodSeconds"] > slept_s


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_probes_metrics_and_the_images_health_check_ask_what_a_router_answers(
    fleet: Objects, router_command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "workers.toml").write_text("workers = []")
    *command, _ = router_command  # without other replicas
    here = [f"--discover=file://{tmp_path}/workers.toml", f"--state-dir={tmp_path}", "--host=127.0.0.1", "--port=0"]
    with running(sys.executable, "-m", "kvist", *command, *here, "--drain-delay-s=0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[4]
        router = containers_of(fleet, "kvist-router")["router"]
        paths = [router[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")]
        paths += [each["path"] for each in fleet["PodMonitor", "kvist-router"]["spec"]["podMetricsEndpoints"]]
        alive, ready, metrics = (httpx.get(url + path, timeout=60, trust_env=False) for path in paths)
        assert (alive.status_code, metrics.status_code) == (200, 200)
        assert (ready.status_code, ready.json()["ready"]) == (503, False)  # as there is no worker
        _, *health_check = [word.replace("http://127.0.0.1:30000", url) for word in instruction("HEALTHCHECK")]
        assert url in health_check[-1]
        assert subprocess.run([sys.executable, *health_check], check=False).returncode == 0
        process.terminate()
        assert process.wait() == 0
        assert subprocess.run([sys.executable, *health_check], capture_output=True, check=False).returncode == 1


def test_nats_takes_its_flags_and_answers_its_probes(
    fleet: Objects, free_port: Callable[[], int], until_true: Callable[..., None]
) -> None:
    nats, ports = containers_of(fleet, "nats")["nats"], {"4222": str(free_port()), "8222": str(free_port())}
    server = shutil.which("nats-server", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin:{BIN}")
    assert server is not None
    arguments = [ports.get(word, word) for word in command_of(nats, fleet)]

    def answers() -> bool:
        try:
            url = f"http://127.0.0.1:{ports['8222']}{nats['readinessProbe']['httpGet']['path']}"
            return httpx.get(url, timeout=60, trust_env=False).status_code == 200
        except httpx.ConnectError:
            return False

    with running(server, "--addr", "127.0.0.1", *arguments):
        until_true(answers)


def test_the_tokeniser_is_fetched_by_a_command_that_there_is(fleet: Objects, tmp_path: Path) -> None:
    hf, *arguments = command_of(containers_of(fleet, "kvist-router")["tokenizer"], fleet)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([BIN / hf, *arguments], env=offline, capture_output=True, text=True, check=False)
    assert "offline mode is enabled" in done.stderr  # and not that it does not know a flag


# Compose


def test_what_compose_starts_fits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = json.loads(output_of("docker-compose", "-f", DEPLOY / "compose.yaml", "config", "--format", "json"))
    services = compose["services"]
    assert services.keys() == {"nats", "worker-1", "worker-2", "router"}
    assert {(each["read_only"], *each["cap_drop"]) for each in services.values()} == {(True, "ALL")}
    assert services["nats"]["command"] == ["--port", "4222"]
    router = route.make_config(parsed(services["router"]["command"]))
    assert services["router"]["ports"][0]["target"] == router.port
    assert services["router"]["stop_grace_period"] == "30s"
    assert router.drain_delay_s + router.shutdown_timeout_s < 30
    for name in ("worker-1", "worker-2"):
        worker = parsed(services[name]["command"])
        (url,) = [each for each in router.worker_urls if urlsplit(each).hostname == name]
        assert urlsplit(url).port == 8100  # which `kvist serve` listens on by itself
        monkeypatch.setattr("socket.gethostname", lambda name=name: services[name]["hostname"])
        assert router.kv_event_sources[url] == (f"{worker.kv_events}/{serve.worker_name(worker.host, 8100)}",)
        assert "http://127.0.0.1:8100/health" in services[name]["healthcheck"]["test"][-1]
        (mounted,) = services[name]["volumes"]
        assert mounted in services["router"]["volumes"]  # so that the router reads prompts as the workers do
        assert (mounted["target"], (Path(mounted["source"]) / "tokenizer.json").exists()) == (worker.model_dir, True)
        build = services[name]["build"]
        assert (Path(build["context"]) / build["dockerfile"]) == DEPLOY / "Dockerfile"
        assert all(f"ARG {argument}" in IMAGE for argument in build["args"])


# systemd


def unit(path: Path) -> RawConfigParser:
    """Return what a unit says; of what it says twice the last."""
    read = RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read(path)
    return read


def test_the_units_start_commands_that_there_are_and_give_them_the_time_to_drain() -> None:
    router, publish = (unit(path)["Service"] for path in reversed(UNITS))
    for service in (router, publish):
        binary, *command = shlex.split(service["ExecStart"])
        assert binary == "/opt/kvist/bin/kvist"
        assert str(parsed(command).state_dir) == f"%S/{service['StateDirectory']}"
    defaults = RouterConfig()
    assert int(router["TimeoutStopSec"]) > 10 + defaults.drain_delay_s + defaults.shutdown_timeout_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_has_nothing_to_say_of_a_unit(path: Path, tmp_path: Path) -> None:
    here = tmp_path / path.name
    here.write_text(path.read_text().replace("/opt/kvist/bin/kvist", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
