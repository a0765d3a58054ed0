"""SGLang's vocabulary, defined in one place."""
