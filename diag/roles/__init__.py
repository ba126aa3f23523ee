"""What each layer is for (its role) and which block it belongs to, found from the graph's structure."""

from diag.roles.attention import Attention
from diag.roles.find import Role, attention_blocks, find_roles, norm_parts
from diag.roles.rules import ROLES

__all__ = ["ROLES", "Attention", "Role", "attention_blocks", "find_roles", "norm_parts"]
