"""`stagemesh bench serve`: measures any OpenAI endpoint.

Pure: `arrivals`, `lengths`, `sse`, `statistics`, `report`, `mesh`. Effects: `http_client` (one
connection per request in flight), `prompts` (asks the endpoint how it counts tokens), `load` (sends
at the planned times) and `serve` (one run). Knows nothing of the gateway: what it learns of a
Stagemesh, it reads from `/v1/mesh` and `/metrics` like anyone else.
"""
