"""The model service: what an agent that is not ours takes for an endpoint of the OpenAI API.

    chat        chat completions as the API has them
    responses   responses
    completions completions of a text
    fields      what the bodies of all of them have in common
    tools       functions that the policy may call
    errors      what is answered to a request that is refused
    history     what was said in one episode so far, and where a request goes on; pure
    deltas      what an agent is told of an answer, while it is sampled and at its end; pure
    sessions    one episode's calls, between the agent that makes them and the environment that takes them
    sse         an answer that is sent as it comes, in server-sent events
    app         all of it over HTTP

The service knows text only. Tokens are the episode's, which appends to what was sampled and never tokenizes it again.
"""
