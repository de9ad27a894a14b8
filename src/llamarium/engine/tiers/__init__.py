"""Where blocks of the prefix cache go besides memory. Never torch."""
