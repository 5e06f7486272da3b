
/tmp/tmp0ij6vmxh.o:     file format elf64-x86-64


Disassembly of section .ltext:

0000000000000000 <k0_body>:
   0:	push   %rbp
   1:	push   %r15
   3:	push   %r14
   5:	push   %r13
   7:	push   %r12
   9:	push   %rbx
   a:	sub    $0x78,%rsp
   e:	movabs $0x0,%rax
  18:	mov    %rcx,%r14
  1b:	shl    $0x5,%r14
  1f:	movabs $0x0,%r12
  29:	mov    %r8,%rbx
  2c:	mov    %rcx,%rbp
  2f:	mov    %rdx,%r15
  32:	mov    %rdi,%r13
  35:	mov    %rsi,0x8(%rsp)
  3a:	vbroadcastss (%rax),%ymm0
  3f:	movabs $0x0,%rax
  49:	vbroadcastss (%rax),%ymm2
  4e:	movabs $0x0,%rax
  58:	vbroadcastss (%rax),%ymm1
  5d:	vmovups %ymm0,0x50(%rsp)
  63:	vmovups %ymm2,0x30(%rsp)
  69:	vmovups %ymm1,0x10(%rsp)
  6f:	jmp    9d <k0_body+0x9d>
  71:	data16 data16 data16 data16 data16 cs nopw 0x0(%rax,%rax,1)
  80:	vmovups 0x0(%r13,%r14,1),%ymm0
  87:	mov    0x8(%rsp),%rax
  8c:	inc    %rbp
  8f:	vaddps %ymm0,%ymm0,%ymm0
  93:	vmovups %ymm0,(%rax,%r14,1)
  99:	add    $0x20,%r14
  9d:	cmp    %rbx,%rbp
  a0:	jge    192 <k0_body+0x192>
  a6:	vmovups 0x0(%r13,%r14,1),%ymm0
  ad:	vmovups 0x50(%rsp),%ymm1
  b3:	vmovdqu 0x10(%rsp),%ymm2
  b9:	xor    %eax,%eax
  bb:	vcmpltps 0x30(%rsp),%ymm0,%k0
  c7:	vmaxps %ymm0,%ymm1,%ymm1
  cb:	vextractf128 $0x1,%ymm1,%xmm0
  d1:	vcmpunordps %ymm1,%ymm1,%k1
  d8:	kortestb %k0,%k0
  dc:	setae  %al
  df:	vmaxps %ymm0,%ymm1,%ymm0
  e3:	vpternlogd $0xe0,%ymm2,%ymm1,%ymm0
  ea:	vmovaps %ymm1,%ymm0{%k1}
  f0:	vshufpd $0x1,%xmm0,%xmm0,%xmm1
  f5:	vcmpunordps %ymm0,%ymm0,%k1
  fc:	vmaxps %xmm1,%xmm0,%xmm1
 100:	vpternlogd $0xe0,%ymm2,%ymm0,%ymm1
 107:	vmovaps %ymm0,%ymm1{%k1}
 10d:	vmovshdup %xmm1,%xmm0
 111:	vcmpunordss %xmm1,%xmm1,%k1
 118:	vmaxss %xmm0,%xmm1,%xmm0
 11c:	vpternlogd $0xa8,%xmm0,%xmm1,%xmm2
 123:	vmovss %xmm1,%xmm2,%xmm2{%k1}
 129:	vmovss %xmm2,0x40(%r15)
 12f:	mov    %eax,(%r15)
 132:	jb     80 <k0_body+0x80>
 138:	vmovss 0x40(%r15),%xmm0
 13e:	mov    $0x1,%edi
 143:	xor    %esi,%esi
 145:	mov    %r15,%rdx
 148:	vmovss %xmm0,(%r15)
 14d:	movl   $0x42c60000,0xc0(%r15)
 158:	mov    %ebp,0x80(%r15)
 15f:	vzeroupper
 162:	call   *%r12
 165:	mov    $0x1,%edi
 16a:	mov    $0x1,%esi
 16f:	lea    0xc0(%r15),%rdx
 176:	call   *%r12
 179:	mov    $0x1,%edi
 17e:	mov    $0x2,%esi
 183:	lea    0x80(%r15),%rdx
 18a:	call   *%r12
 18d:	jmp    80 <k0_body+0x80>
 192:	add    $0x78,%rsp
 196:	pop    %rbx
 197:	pop    %r12
 199:	pop    %r13
 19b:	pop    %r14
 19d:	pop    %r15
 19f:	pop    %rbp
 1a0:	vzeroupper
 1a3:	ret
 1a4:	data16 data16 cs nopw 0x0(%rax,%rax,1)

00000000000001b0 <pbk_task0>:
 1b0:	push   %rax
 1b1:	shl    $0x8,%rcx
 1b5:	mov    %rsi,%rax
 1b8:	mov    (%rdi),%r10
 1bb:	mov    0x8(%rdi),%rsi
 1bf:	add    0x10(%rdi),%rcx
 1c3:	movabs $0x0,%r9
 1cd:	mov    %rdx,%r8
 1d0:	mov    %rcx,%rdx
 1d3:	mov    %r10,%rdi
 1d6:	mov    %rax,%rcx
 1d9:	call   *%r9
 1dc:	pop    %rax
 1dd:	ret
 1de:	xchg   %ax,%ax

00000000000001e0 <pbk_main>:
 1e0:	sub    $0x18,%rsp
 1e4:	vmovups (%rsi),%xmm0
 1e8:	movabs $0x0,%rax
 1f2:	mov    %rsp,%rdi
 1f5:	xor    %esi,%esi
 1f7:	xor    %ecx,%ecx
 1f9:	vmovups %xmm0,(%rsp)
 1fe:	mov    %rdx,0x10(%rsp)
 203:	mov    $0x4,%edx
 208:	call   *%rax
 20a:	add    $0x18,%rsp
 20e:	ret
 20f:	nop

0000000000000210 <pbk_run>:
 210:	push   %r15
 212:	push   %r14
 214:	push   %r13
 216:	push   %r12
 218:	push   %rbx
 219:	sub    $0x10,%rsp
 21d:	mov    %rsi,%rbx
 220:	movabs $0x0,%r15
 22a:	movabs $0x0,%rax
 234:	lea    0x8(%rsp),%rcx
 239:	mov    $0x1000,%esi
 23e:	mov    $0x1000,%edx
 243:	mov    %rdi,%r14
 246:	mov    %r15,%rdi
 249:	call   *%rax
 24b:	mov    0x8(%rsp),%r13
 250:	mov    %rax,%r12
 253:	movabs $0x0,%rax
 25d:	mov    %r14,%rdi
 260:	mov    %rbx,%rsi
 263:	mov    %r13,%rdx
 266:	call   *%rax
 268:	movabs $0x0,%rax
 272:	mov    %r15,%rdi
 275:	mov    %r13,%rsi
 278:	mov    %r12,%rdx
 27b:	call   *%rax
 27d:	add    $0x10,%rsp
 281:	pop    %rbx
 282:	pop    %r12
 284:	pop    %r13
 286:	pop    %r14
 288:	pop    %r15
 28a:	ret
 28b:	nopl   0x0(%rax,%rax,1)

0000000000000290 <pbk_call>:
 290:	push   %rax
 291:	movabs $0x0,%rax
 29b:	mov    %rdi,%rsi
 29e:	xor    %edi,%edi
 2a0:	call   *%rax
 2a2:	pop    %rax
 2a3:	ret
 2a4:	data16 data16 cs nopw 0x0(%rax,%rax,1)

00000000000002b0 <pbk_handler>:
 2b0:	mov    0x8(%rdi),%rax
 2b4:	test   %rax,%rax
 2b7:	je     2e8 <pbk_handler+0x38>
 2b9:	cmpl   $0x1,0x8(%rax)
 2bd:	sete   %cl
 2c0:	test   %cl,%cl
 2c2:	je     2ee <pbk_handler+0x3e>
 2c4:	mov    0x18(%rax),%rax
 2c8:	movabs $0x300000000,%rcx
 2d2:	mov    %rcx,0x18(%rax)
 2d6:	movl   $0x0,0x20(%rax)
 2dd:	movq   $0x0,0x28(%rax)
 2e5:	xor    %eax,%eax
 2e7:	ret
 2e8:	xor    %ecx,%ecx
 2ea:	test   %cl,%cl
 2ec:	jne    2c4 <pbk_handler+0x14>
 2ee:	sub    $0x18,%rsp
 2f2:	mov    0x48(%rdi),%rax
 2f6:	mov    0x70(%rdi),%rcx
 2fa:	lea    0x8(%rsp),%rsi
 2ff:	mov    (%rax),%rax
 302:	mov    0x18(%rax),%rax
 306:	mov    %rax,0x8(%rsp)
 30b:	mov    (%rcx),%rax
 30e:	mov    0x18(%rax),%rax
 312:	mov    %rax,0x10(%rsp)
 317:	movabs $0x0,%rax
 321:	call   *%rax
 323:	add    $0x18,%rsp
 327:	xor    %eax,%eax
 329:	ret
 32a:	nopw   0x0(%rax,%rax,1)

0000000000000330 <_mlir_k0_body>:
 330:	push   %rax
 331:	mov    (%rdi),%rax
 334:	mov    0x10(%rdi),%rdx
 338:	mov    0x8(%rdi),%rcx
 33c:	mov    0x18(%rdi),%r8
 340:	mov    0x20(%rdi),%rdi
 344:	movabs $0x0,%r9
 34e:	mov    (%rcx),%rsi
 351:	mov    (%r8),%rcx
 354:	mov    (%rax),%rax
 357:	mov    (%rdi),%r8
 35a:	mov    (%rdx),%rdx
 35d:	mov    %rax,%rdi
 360:	call   *%r9
 363:	pop    %rax
 364:	ret
 365:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000370 <_mlir_pbk_task0>:
 370:	push   %rax
 371:	mov    (%rdi),%rax
 374:	mov    0x10(%rdi),%rdx
 378:	mov    0x8(%rdi),%rcx
 37c:	mov    0x18(%rdi),%rdi
 380:	movabs $0x0,%r8
 38a:	mov    (%rcx),%rsi
 38d:	mov    (%rax),%rax
 390:	mov    (%rdi),%rcx
 393:	mov    (%rdx),%rdx
 396:	mov    %rax,%rdi
 399:	call   *%r8
 39c:	pop    %rax
 39d:	ret
 39e:	xchg   %ax,%ax

00000000000003a0 <_mlir_pbk_main>:
 3a0:	push   %rax
 3a1:	mov    (%rdi),%rax
 3a4:	mov    0x10(%rdi),%rdx
 3a8:	mov    0x8(%rdi),%rcx
 3ac:	mov    (%rax),%rax
 3af:	mov    (%rcx),%rsi
 3b2:	mov    (%rdx),%rdx
 3b5:	movabs $0x0,%rcx
 3bf:	mov    %rax,%rdi
 3c2:	call   *%rcx
 3c4:	pop    %rax
 3c5:	ret
 3c6:	cs nopw 0x0(%rax,%rax,1)

00000000000003d0 <_mlir_pbk_run>:
 3d0:	push   %rax
 3d1:	mov    0x8(%rdi),%rcx
 3d5:	mov    (%rdi),%rax
 3d8:	mov    (%rax),%rdi
 3db:	mov    (%rcx),%rsi
 3de:	movabs $0x0,%rax
 3e8:	call   *%rax
 3ea:	pop    %rax
 3eb:	ret
 3ec:	nopl   0x0(%rax)

00000000000003f0 <_mlir_pbk_call>:
 3f0:	push   %rax
 3f1:	mov    (%rdi),%rax
 3f4:	mov    (%rax),%rdi
 3f7:	movabs $0x0,%rax
 401:	call   *%rax
 403:	pop    %rax
 404:	ret
 405:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000410 <_mlir_pbk_handler>:
 410:	push   %rbx
 411:	mov    (%rdi),%rax
 414:	mov    %rdi,%rbx
 417:	mov    (%rax),%rdi
 41a:	movabs $0x0,%rax
 424:	call   *%rax
 426:	mov    0x8(%rbx),%rcx
 42a:	mov    %rax,(%rcx)
 42d:	pop    %rbx
 42e:	ret

