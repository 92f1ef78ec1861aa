//! Ends a process that cannot continue, with an error, from any point in the program.
//!
//! A stack overflow or a failed allocation kills a process with a signal. If that happens in sandboxed work, or for
//! lack of memory, the signal's handler writes an error and ends the process itself. Handlers and allocators may
//! neither allocate nor take locks, so the text is written in pieces, by system calls.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// The problem that is reported if memory runs out within this process's limits.
pub(super) const PROCESS_LIMITS_PROBLEM: &str =
    "there is not enough memory within the limits of this process; raise them (ulimit -v, -d and -u)";

/// The maximum size of a stack.
const MAX_STACK_BYTES: usize = 1 << 30;

/// The work that runs on a thread.
#[derive(Clone, Copy)]
struct ThreadWork {
    /// The subject's name, which outlives the work; empty without work.
    subject: *const str,
    /// An address on the stack, above all frames of the work.
    top: *const u8,
}

const NO_WORK: ThreadWork = ThreadWork { subject: "", top: std::ptr::null() };

thread_local! {
    static WORK: Cell<ThreadWork> = const { Cell::new(NO_WORK) };
    static OUT_OF_MEMORY: Cell<bool> = const { Cell::new(false) };
}

/// Records the start of work. `subject` must live until [`leave`].
pub(super) fn enter(subject: &str, top: *const u8) {
    WORK.set(ThreadWork { subject: &raw const *subject, top });
}

pub(super) fn leave() {
    WORK.set(NO_WORK);
}

/// Records that an allocation failed.
pub(super) fn no_memory() {
    _ = OUT_OF_MEMORY.try_with(|flag| flag.set(true));
}

/// Ends the process with an error about `subject`.
pub(super) fn end(subject: &str, problem: &str) -> ! {
    let advice = if subject.is_empty() { "" } else { "; copy the file again from its source, or use another one" };
    for text in ["error: ", subject, problem, advice, "\n"] {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            // SAFETY: the pointer and the length are those of `rest`.
            match unsafe { libc::write(2, rest.as_ptr().cast(), rest.len()) } {
                written if written > 0 => rest = rest.get(written.cast_unsigned()..).unwrap_or_default(),
                _ => break,
            }
        }
    }
    // SAFETY: the call ends the process and runs none of its code.
    unsafe { libc::_exit(1) }
}

/// Ends the process with an error about the subject of this thread's work.
pub(super) fn end_of_work(problem: &str) -> ! {
    let work = WORK.try_with(Cell::get).unwrap_or(NO_WORK);
    // SAFETY: `enter` was given a text that lives until `leave`.
    end(unsafe { &*work.subject }, problem)
}

extern "C" fn handle_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let work = WORK.try_with(Cell::get).unwrap_or(NO_WORK);
    if !work.top.is_null() && !info.is_null() {
        // SAFETY: the system passes a complete `siginfo_t` with this signal.
        let address = unsafe { (*info).si_addr() } as usize;
        if address < work.top as usize && work.top as usize - address < MAX_STACK_BYTES {
            end_of_work(" is nested too deeply");
        }
    }
    restore_previous_action(signal);
}

extern "C" fn handle_abort(signal: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if OUT_OF_MEMORY.try_with(Cell::get).unwrap_or(false) {
        match WORK.try_with(Cell::get).unwrap_or(NO_WORK).top.is_null() {
            true => end("", PROCESS_LIMITS_PROBLEM),
            false => end_of_work(" needs more memory than is available"),
        }
    }
    restore_previous_action(signal);
}

/// The signals for which this module has a handler, and their previous actions.
static PREVIOUS_ACTIONS: OnceLock<[(libc::c_int, libc::sigaction); 3]> = OnceLock::new();

/// Restores the previous action of `signal`: the signal is raised again when the handler returns.
fn restore_previous_action(signal: libc::c_int) {
    for (handled, action) in PREVIOUS_ACTIONS.get().into_iter().flatten() {
        if *handled == signal {
            // SAFETY: the action was returned by the system.
            unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
        }
    }
}

/// Installs the handlers.
pub(super) fn listen() {
    type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    PREVIOUS_ACTIONS.get_or_init(|| {
        let handlers: [(libc::c_int, Handler); 3] =
            [(libc::SIGSEGV, handle_fault), (libc::SIGBUS, handle_fault), (libc::SIGABRT, handle_abort)];
        handlers.map(|(signal, handler)| {
            // SAFETY: a zeroed action is the default one. The handlers do only what is async-signal-safe, and run on
            // the stack that the standard library provides to each thread for stack overflow signals.
            unsafe {
                let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
                let mut before = action;
                action.sa_sigaction = handler as *const () as libc::sighandler_t;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigaction(signal, &raw const action, &raw mut before);
                (signal, before)
            }
        })
    });
}
