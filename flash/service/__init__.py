"""The model service: an HTTP endpoint that looks like the APIs of OpenAI and Anthropic to an agent whose code is not
part of Flash.

    app         the HTTP application, and answers that are streamed while they are sampled
    chat        chat completions
    completions completions of a text
    responses   the Responses API and its items
    messages    the Messages API of Anthropic and its content blocks
    fields      request fields that all of these have in common, and error responses
    forms       forms that an answer must have: a JSON schema of the text, or a call of a function
    tools       functions that the policy may call
    sessions    the calls of one episode, between the agent that makes them and the environment that answers them
    history     the messages of an episode so far, and the branch in which a request continues; pure

The service handles text only. The episode owns the tokens: it appends to the sampled tokens and never tokenizes their
text again.
"""
