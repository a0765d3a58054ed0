pytest_plugins = ["fixtures.records"]
