"""The model service: what an agent that is not ours takes for an endpoint of the OpenAI API.

    chat        requests and answers as the API has them, its errors
    history     what was said in one episode so far, and whether a request goes on from there; pure
    sessions    one episode's calls, between the agent that makes them and the environment that takes them
    app         all of it over HTTP

The service knows text only. Tokens are the episode's, which appends to what was sampled and never tokenizes it again.
"""
