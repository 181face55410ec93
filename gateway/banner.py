"""What a person sees when the mesh is ready: where it is and a line to try."""

from __future__ import annotations

import json

from services.rpc.addresses import join_host_port


def banner(
    host: str,
    rest_port: int,
    grpc_port: int,
    model: str,
    *,
    chat: bool,
    keys: bool = False,
    tls: bool = False,
) -> str:
    """The text, ending with a curl line that works when pasted; with `tls` where the server's
    CA is trusted."""
    url = f"{'https' if tls else 'http'}://{join_host_port(host, rest_port)}"
    if chat:
        path = "/v1/chat/completions"
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "stream": True,
        }
    else:
        path = "/v1/completions"
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 16}
    key = ' -H "Authorization: Bearer $STAGEMESH_API_KEY"' if keys else ""
    return (
        f"\nStagemesh serves {model} at {url} (gRPC {join_host_port(host, grpc_port)}). Try:\n\n"
        f"  curl -N {url}{path} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{json.dumps(body)}'\n"
    )
