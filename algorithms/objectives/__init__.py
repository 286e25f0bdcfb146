"""Policy objectives, one file per method; `algorithms.OBJECTIVES` names them, `algorithms.base` says what each is."""
