"""SGLang's own backends, of a released wheel or a checkout, behind our interface."""
