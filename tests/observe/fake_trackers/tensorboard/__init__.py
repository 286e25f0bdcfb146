"""Package of the fake writer, with the layout of the real one."""
