import type { SeccompArchitecture } from './seccomp.ts';

/**
 * Process 1 of a sandbox, as a program of 133 (x86-64) or 148 (AArch64) bytes of machine code: it has to
 * run in any image, with no library and no interpreter, in a few kilobytes, and no shell can do its work
 * (dash catches SIGCHLD whatever it is told, and collects no orphans). What it does:
 *
 *     sigaction(SIGCHLD, SIG_IGN)        the kernel then collects orphans by itself
 *     write(1, "\n", 1)                  says that it runs
 *     while ((n = read(0, buffer, 96)) > 0 || n == -EINTR)
 *         if (n > 0) { kill(-1, SIGKILL); write(1, buffer, n) }
 *     exit_group(0)
 *
 * kill(-1) from process 1 ends every other process of the namespace at once: a fork cannot outrun it.
 * Signals from inside do not reach process 1, and the file is bound without read permission, so the kernel
 * lets nothing inside look into it (ptrace(2), "dumpable"). Numbers: System V ABI for each architecture,
 * system calls of asm/unistd.h.
 */
const CODE: Record<SeccompArchitecture, string> = {
  x64: `
    4883ec60        sub rsp, 96                 buffer
    31c0            xor eax, eax
    4889442408      mov [rsp+8], rax            struct sigaction: flags,
    4889442410      mov [rsp+16], rax           restorer,
    4889442418      mov [rsp+24], rax           mask
    ffc0            inc eax
    48890424        mov [rsp], rax              handler: SIG_IGN
    bf11000000      mov edi, 17                 SIGCHLD
    4889e6          mov rsi, rsp
    31d2            xor edx, edx
    41ba08000000    mov r10d, 8
    b80d000000      mov eax, 13                 rt_sigaction
    0f05            syscall
    c604240a        mov byte [rsp], 10
    ba01000000      mov edx, 1
    eb2e            jmp answer
    31ff            next: xor edi, edi
    4889e6          mov rsi, rsp
    ba60000000      mov edx, 96
    31c0            xor eax, eax                read
    0f05            syscall
    83f8fc          cmp eax, -4                 EINTR
    74ed            je next
    85c0            test eax, eax
    7e28            jle end
    89c3            mov ebx, eax
    48c7c7ffffffff  mov rdi, -1
    be09000000      mov esi, 9                  SIGKILL
    b83e000000      mov eax, 62                 kill
    0f05            syscall
    89da            mov edx, ebx
    bf01000000      answer: mov edi, 1
    4889e6          mov rsi, rsp
    b801000000      mov eax, 1                  write
    0f05            syscall
    ebc1            jmp next
    31ff            end: xor edi, edi
    b8e7000000      mov eax, 231                exit_group
    0f05            syscall`,
  arm64: `
    ff8301d1        sub sp, sp, 96
    290080d2        mov x9, 1                   SIG_IGN
    e97f00a9        stp x9, xzr, [sp]
    ff7f01a9        stp xzr, xzr, [sp, 16]
    200280d2        mov x0, 17                  SIGCHLD
    e1030091        mov x1, sp
    020080d2        mov x2, 0
    030180d2        mov x3, 8
    c81080d2        mov x8, 134                 rt_sigaction
    010000d4        svc 0
    49018052        mov w9, 10
    e9030039        strb w9, [sp]
    220080d2        mov x2, 1
    10000014        b answer
    000080d2        next: mov x0, 0
    e1030091        mov x1, sp
    020c80d2        mov x2, 96
    e80780d2        mov x8, 63                  read
    010000d4        svc 0
    1f100031        cmn w0, 4                   EINTR
    40ffff54        b.eq next
    1f000071        cmp w0, 0
    8d010054        b.le end
    f303002a        mov w19, w0
    00008092        mov x0, -1
    210180d2        mov x1, 9                   SIGKILL
    281080d2        mov x8, 129                 kill
    010000d4        svc 0
    e203132a        mov w2, w19
    200080d2        answer: mov x0, 1
    e1030091        mov x1, sp
    080880d2        mov x8, 64                  write
    010000d4        svc 0
    edffff17        b next
    000080d2        end: mov x0, 0
    c80b80d2        mov x8, 94                  exit_group
    010000d4        svc 0`,
};

const MACHINE: Record<SeccompArchitecture, number> = { x64: 62, arm64: 183 };
const BASE = 0x400000n;
const HEADER_BYTES = 64;
const SEGMENT_BYTES = 56;
const [EXECUTABLE, WRITABLE, READABLE] = [1, 2, 4];
const [PT_LOAD, PT_GNU_STACK] = [1, 0x6474e551];

/** The program as a static ELF file: one segment that cannot be written, and a stack that cannot run. */
export function initProgram(architecture: SeccompArchitecture): Buffer {
  const lines = CODE[architecture].trim().split('\n');
  const code = Buffer.from(lines.map((line) => line.trim().split(' ')[0]).join(''), 'hex');
  const start = HEADER_BYTES + 2 * SEGMENT_BYTES;
  const file = Buffer.alloc(start + code.length);
  code.copy(file, start);
  Buffer.from([0x7f, 0x45, 0x4c, 0x46, 2, 1, 1]).copy(file); // ELF, 64 bits, little endian, version 1
  file.writeUInt16LE(2, 16); // executable
  file.writeUInt16LE(MACHINE[architecture], 18);
  file.writeUInt32LE(1, 20);
  file.writeBigUInt64LE(BASE + BigInt(start), 24);
  file.writeBigUInt64LE(BigInt(HEADER_BYTES), 32); // program headers
  file.writeUInt16LE(HEADER_BYTES, 52);
  file.writeUInt16LE(SEGMENT_BYTES, 54);
  file.writeUInt16LE(2, 56);
  file.writeUInt32LE(PT_LOAD, HEADER_BYTES);
  file.writeUInt32LE(READABLE | EXECUTABLE, HEADER_BYTES + 4);
  file.writeBigUInt64LE(BASE, HEADER_BYTES + 16);
  file.writeBigUInt64LE(BASE, HEADER_BYTES + 24);
  file.writeBigUInt64LE(BigInt(file.length), HEADER_BYTES + 32);
  file.writeBigUInt64LE(BigInt(file.length), HEADER_BYTES + 40);
  file.writeBigUInt64LE(4096n, HEADER_BYTES + 48);
  file.writeUInt32LE(PT_GNU_STACK, HEADER_BYTES + SEGMENT_BYTES);
  file.writeUInt32LE(READABLE | WRITABLE, HEADER_BYTES + SEGMENT_BYTES + 4);
  return file;
}
