"""The transfer of a weight version from the trainer to the engines, and the checks that it has arrived.

*Version* n is the weights after n training steps. A *publisher* in each trainer rank offers the version. An engine
(vLLM) has one or several *workers*, each with a receiver and the model or a part of it. The *canary* is a short text
with the trainer's log-probs, which an engine must reproduce.

    trainer ranks                      hub                  node loop and engine workers
    publisher.publish ── Published ──► Hub ── Published ──► VLLMEngine.load: pause, then in each worker:
        └─ image: copies, checksums ────── bytes ─────────► worker.WeightReceiver.receive_weights
                                                            resume, versions.LoadedWeights.check, check_canary
                                       Hub ◄──────────────── acknowledge

    backend     transfer of the bytes                                 classes
    tcp         each worker pulls from rank 0 over its connection     tcp.WeightServer → tcp.TcpReceiver
    nccl, gloo  rank 0 broadcasts to the workers that request it      broadcast.BroadcastServer → BroadcastReceiver
    ipc         workers open copies on the shared GPU                 publisher.IpcPublisher → vLLM's own receiver

Invariants: a version is immutable (`image`, `publisher`), carries checksums (`image`), is acknowledged by every engine
before the next one is announced (`flash.hub.fleet`), and is checked by the canary (`versions`). A worker that cannot
load a version reports a typed `versions.LoadFailure`.

Security: workers and trainer prove to each other that they know a secret token, received sizes are bounded before
memory is allocated, and nothing that arrives is unpickled (`tcp`). The handles of ipc are the exception
(`publisher.IpcPublisher`).
"""
