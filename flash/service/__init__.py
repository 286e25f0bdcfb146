"""The model service: what an agent that is not ours takes for an endpoint of the OpenAI API.

    chat        chat completions as the API has them
    responses   responses
    completions completions of a text
    bodies      what the bodies of all of them have in common
    kept        what was said so far, for who names it or repeats it as one text
    tools       functions that the policy may call
    errors      what is answered to a request that is refused
    matching    whether what comes back stands for an answer of ours
    history     what was said in one episode so far, and where a request goes on; pure
    telling     what an agent is told of an answer, while it is sampled and at its end; pure
    sessions    one episode's calls, between the agent that makes them and the environment that takes them
    streamed    an answer that is sent as it comes
    app         all of it over HTTP

The service knows text only. Tokens are the episode's, which appends to what was sampled and never tokenizes it again.
"""
