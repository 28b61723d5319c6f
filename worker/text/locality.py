"""Finds out whether later messages can change the text that a chat template gives an earlier message. Pure.

If they cannot, the template is local: it renders the end of a conversation to the same text even if most
earlier messages are left out. This is derived from the template's source. A construct that is not known to be
harmless is assumed to depend on other messages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal, TypeAlias

from jinja2 import Environment, TemplateError, nodes

_Place: TypeAlias = Literal["before", "inside", "after"]

#: Attributes of the loop over the messages that do not depend on where the conversation ends, nor change when
#: an even number of earlier messages is left out.
_NEAR: Final = {"first", "last", "previtem", "nextitem"}
_INDICES: Final = {"index", "index0"}
#: Nodes that end the loop early, work on the text of all messages, or lead to other templates.
_REFUSED: Final = (
    *(nodes.Break, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock, nodes.Block),
    *(nodes.Extends, nodes.Import, nodes.FromImport, nodes.Include),
)
#: Functions that carry state from one message to another, or are random.
_STATEFUL: Final = {"cycler", "joiner", "random"}


class _LooksBackError(Exception):
    """The text of a message may depend on any other message."""


@lru_cache(maxsize=16)
def num_first(template: str | None) -> int | None:
    """Return how many of the first messages may influence all later texts; None if the template is not local.

    In a local template a message's text depends on these messages, on its neighbours, and on whether its
    index is odd. Text before all messages depends on the first messages, text after them on the last one.
    """
    if template is None:
        return None
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(template)
        return _Proof(tree).num_first
    except (TemplateError, _LooksBackError):
        return None


class _Proof:
    """Proves from a template's syntax tree that it is local, or raises `_LooksBackError`."""

    def __init__(self, tree: nodes.Template) -> None:
        self._lists = {"messages"}
        self.num_first = 1
        self._find_lists(tree)
        self._place: _Place = "before"
        self._nested = False
        self._visit(tree)
        if self._place == "before":
            raise _LooksBackError

    def _find_lists(self, tree: nodes.Template) -> None:
        """Find the variables that hold messages, and count the first messages that slices `[1:]` skip."""
        assigned = [
            (node.target.name, node.node)
            for node in tree.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name)
        ]
        for _ in assigned:  # a variable may be assigned from a variable, and so on
            self._lists |= {name for name, value in assigned if self._is_list(value)}
        self.num_first += sum(self._is_rest(node) for node in tree.find_all(nodes.Getitem))

    def _is_list(self, node: nodes.Node | None) -> bool:
        return (isinstance(node, nodes.Name) and node.name in self._lists) or self._is_rest(node)

    def _is_rest(self, node: nodes.Node | None) -> bool:
        """Return whether `node` is `messages[1:]`."""
        if not isinstance(node, nodes.Getitem) or not isinstance(node.arg, nodes.Slice):
            return False
        cut = node.arg
        return (
            isinstance(node.node, nodes.Name)
            and node.node.name in self._lists
            and _is_const(cut.start, 1)
            and cut.stop is None
            and cut.step is None
        )

    def _visit(self, node: nodes.Node) -> None:
        if isinstance(node, _REFUSED):
            raise _LooksBackError
        if isinstance(node, nodes.For):
            self._visit_for(node)
        elif isinstance(node, nodes.Macro):
            self._visit_macro(node)
        elif isinstance(node, nodes.Name):
            self._check_name(node.name)
        elif isinstance(node, nodes.NSRef) and self._place == "inside":
            raise _LooksBackError  # a later message could read what this one stores
        elif not self._is_harmless(node):
            for child in node.iter_child_nodes():
                self._visit(child)

    def _visit_for(self, node: nodes.For) -> None:
        if not self._is_list(node.iter):
            self._visit(node.iter)
            nested, self._nested = self._nested, True
            for child in (node.target, node.test, *node.body, *node.else_):
                if child is not None:
                    self._visit(child)
            self._nested = nested
            return
        if self._place != "before" or self._nested or node.test or node.recursive or node.else_:
            raise _LooksBackError
        self._place = "inside"
        for child in (node.target, *node.body):
            self._visit(child)
        self._place = "after"

    def _visit_macro(self, node: nodes.Macro) -> None:
        """Check a macro as strictly as the body of the loop, since the body may call it."""
        place, self._place = self._place, "inside"
        nested, self._nested = self._nested, True
        for child in node.iter_child_nodes():
            self._visit(child)
        self._place, self._nested = place, nested

    def _check_name(self, name: str) -> None:
        late = name == "add_generation_prompt" and self._place != "after"
        loop = name == "loop" and self._place == "inside" and not self._nested
        if name in self._lists or name in _STATEFUL or late or loop:
            raise _LooksBackError

    def _is_harmless(self, node: nodes.Node) -> bool:
        """Return whether it is known that `node` keeps its value when earlier messages are left out."""
        match node:
            case nodes.Assign(target=nodes.Name(), node=value) if self._is_list(value):
                return self._place != "inside"
            case nodes.Getitem(node=nodes.Name(name=name), arg=arg) if name in self._lists:
                return (
                    _is_const(arg, 0)
                    or (self._place == "inside" and self._is_neighbour(arg))
                    or (self._place == "after" and isinstance(arg, nodes.Neg) and _is_const(arg.node, 1))
                )
            case nodes.Compare(expr=nodes.Filter(node=counted, name="length" | "count"), ops=[operand]):
                return self._is_list(counted) and _is_const(operand.expr, 0)
            case nodes.Getattr(attr=attr) if attr in _NEAR:
                return self._is_loop(node)
            case nodes.Mod(left=left, right=right):
                return self._is_index(left) and _is_const(right, 2)
            case nodes.Test(node=tested, name="even" | "odd"):
                return self._is_index(tested)
            case nodes.Compare(expr=compared, ops=[operand]):
                return self._is_index(compared) and (_is_const(operand.expr, 0) or _is_const(operand.expr, 1))
        return False

    def _is_neighbour(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Add | nodes.Sub):
            return self._is_index(node.left) and _is_const(node.right, 1)
        return self._is_index(node)

    def _is_index(self, node: nodes.Node | None) -> bool:
        return isinstance(node, nodes.Getattr) and node.attr in _INDICES and self._is_loop(node)

    def _is_loop(self, node: nodes.Getattr) -> bool:
        """Return whether `node` refers to the loop over the messages, not to a loop inside its body."""
        ours = self._place == "inside" and not self._nested
        return ours and isinstance(node.node, nodes.Name) and node.node.name == "loop"


def _is_const(node: nodes.Node | None, value: int) -> bool:
    return isinstance(node, nodes.Const) and node.value is not None and node.value == value
