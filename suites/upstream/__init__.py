"""Claims: SGLang's own backends agree with the oracle on every case, but for recorded findings."""
