"""The model service: an HTTP endpoint that looks like the OpenAI API to an agent whose code is not part of Flash.

    chat        chat completions
    responses   responses
    items       the items that responses consist of
    completions completions of a text
    fields      request fields that all of these have in common
    tools       functions that the policy may call
    errors      error responses
    history     the messages of an episode so far, and the branch in which a request continues; pure
    deltas      the pieces of an answer that an agent receives while it is sampled and at its end; pure
    sessions    the calls of one episode, between the agent that makes them and the environment that answers them
    sse         an answer that is streamed while it is sampled, as server-sent events
    app         the HTTP application

The service handles text only. The episode owns the tokens: it appends to the sampled tokens and never tokenizes their
text again.
"""
