"""The gRPC front door: InferenceService over the same frontend as REST.

`server.create_inference_server` makes the server.
"""
