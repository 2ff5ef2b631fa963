"""The image and compose.yaml name only what exists; nothing here needs a container engine."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from backends.variants import PRECISIONS
from deploy.fleet import REPLICAS
from sluice.settings import load

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def test_every_run_line_is_a_target_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^RUN (.*)$", DOCKERFILE, re.MULTILINE)
    assert targets
    for line in targets:
        words = line.split()
        assert words[0] == "make", line
        for target in words[1:]:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


def test_images_are_pinned_to_a_version_or_built_here():
    for name, service in COMPOSE["services"].items():
        image = service["image"]
        built = image == "sluice"
        assert built or re.search(r":\d+\.\d+", image), f"{name}: {image}"
    assert re.search(r"^FROM \S+:\d", DOCKERFILE, re.MULTILINE)


def test_gateways_serve_a_config_that_loads_over_the_fleet_that_runs():
    """Replica by replica: same port, same precision."""
    gateways = [s for n, s in COMPOSE["services"].items() if n.startswith("gateway")]
    assert len(gateways) == 2
    ports = set()
    for service in gateways:
        _, _, config, _, port = service["command"]
        ports.add(port)
        settings = load(ROOT / config)
        assert settings.store.kind == "redis"
        assert settings.store.url_env in service["environment"]
        urls = {r.name: (r.url, r.variant) for r in settings.fleet}
        assert urls == {
            r.name: (f"http://127.0.0.1:{r.port}", f"smollm2-135m-{PRECISIONS[r.variant].name}")
            for r in REPLICAS
        }
    published = {entry.split(":")[-1] for entry in COMPOSE["services"]["fleet"]["ports"]}
    assert published == ports
    assert all(p.startswith("127.0.0.1:") for p in COMPOSE["services"]["fleet"]["ports"])


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose")
def test_docker_compose_reads_the_file():
    run = subprocess.run(
        [shutil.which("docker-compose"), "-f", "compose.yaml", "config", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
