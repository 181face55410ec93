"""The REST front door, compatible with OpenAI's API.

`app.create_rest_app` makes the application, `server.RestServer` serves it.
"""
