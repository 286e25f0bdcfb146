"""Module that a fork server preloads, and nothing else imports: importing it makes the server ready to fork."""

from flash.foreign.forking import serve

serve()
