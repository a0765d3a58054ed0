# heap comes before the plugins that import torch
pytest_plugins = ["fixtures.pytest_plugin.heap", "fixtures.pytest_plugin.plugin"]
